"""Engines as servers: their APIs, clients, and pools of engines with one failure rule."""
