"""The training API over HTTP: Tinker's protocol over rlloop's training service."""
