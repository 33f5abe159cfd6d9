"""The training loop, its schedule, and conversations with environments."""
