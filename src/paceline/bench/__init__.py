"""Measuring engines: what a run took, what it committed, what was accepted."""
