"""Processes: one process, Ray's actors or engines in several regions. The only package that knows Ray."""
