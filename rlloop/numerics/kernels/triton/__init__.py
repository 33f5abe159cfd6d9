"""The contracts' operations for CUDA tensors. `contract` has one function for each operator; nothing here is imported
before the first CUDA tensor arrives, so a machine without Triton never misses it.

Every forward is compiled without contraction of a * b + c, and what a reduction's order could hang on (a tile's shape,
its warps, what the compiler knows of an address) is a function of the tensors' widths alone, never of how many rows
there are. Matrix products are the exception that needs no care: an output is one chain over ascending K whatever the
tile, as long as nothing splits K.
"""
