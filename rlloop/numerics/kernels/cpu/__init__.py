"""Kernels for CPU tensors: `backend` has the functions, `compiled` what numba compiles for them."""
