"""Kernels by device: one package for each backend."""
