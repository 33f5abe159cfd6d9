"""Servers and clients over HTTP: who may ask, how much, for how long."""
