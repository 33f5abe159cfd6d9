"""What versions of Gluon name differently."""

from triton.experimental.gluon import language as gl

barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier  # from Triton 3.7 on
