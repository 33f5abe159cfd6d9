"""Parallelism: the layout of ranks (imports no torch), and the context of one rank (does)."""
