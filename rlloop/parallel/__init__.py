"""Ranks: how many there are on each axis, and one rank's own place among them. Light: `context` alone imports torch."""
