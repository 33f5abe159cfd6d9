"""Gluon's names that differ between Triton 3.6 and 3.7."""

from triton.experimental.gluon import language as gl

barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier
