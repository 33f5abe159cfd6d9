"""Engines over HTTP: servers, clients, and the router over them."""
