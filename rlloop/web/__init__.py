"""HTTP servers and clients with authentication, size limits and time-outs."""

TOKEN_VARIABLE = "RLLOOP_TOKEN"  # of the environment: the token that servers ask for
