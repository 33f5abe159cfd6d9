"""The training API over HTTP: Tinker's wire over rlloop's training service."""
