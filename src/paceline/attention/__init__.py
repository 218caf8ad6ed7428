"""Attention over paged KV: one seam (``backend``), several backends, chosen once at start-up."""
