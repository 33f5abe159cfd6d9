"""One of everything that a package outside of rlloop can add to it. A recipe names each by its dotted path."""
