"""`rlloop parity A B`: compares two definitions of one model, down to the first operation that differs."""
