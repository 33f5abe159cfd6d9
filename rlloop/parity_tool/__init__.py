"""`rlloop parity A B`: two definitions of one model, compared down to the first operation that differs."""
