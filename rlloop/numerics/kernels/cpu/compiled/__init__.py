"""Kernels compiled by numba, on flat numpy arrays. `rlloop.numerics.kernels.cpu` calls them with tensors."""
