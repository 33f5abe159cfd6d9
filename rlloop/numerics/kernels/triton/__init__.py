"""Kernels for CUDA tensors, in Triton and Gluon: `backend` has the functions. Nothing here is imported before the
first CUDA tensor arrives, so a machine without one needs no Triton.

Every forward is compiled without contraction of a * b + c, and what a reduction's order could depend on (a tile's
shape, its warps, what the compiler knows of an address) is a function of the tensors' widths alone, never of how many
rows there are. Matrix products need no such care: an output is one chain over ascending K whatever the tile, as long as
nothing splits K.
"""
