"""Random weights of a given shape and a generated task, to try machines, layouts and speeds."""
