"""HTTP servers and clients with authentication, size limits and time-outs."""
