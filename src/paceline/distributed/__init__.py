"""Tensor parallelism behind the ``TPGroup`` seam."""
