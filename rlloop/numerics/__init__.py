"""Operations by contract: what is summed, in which order, in which precision, and rounded when.

The bits of one row are a function of that row's inputs, the weights and constants only. Batch size, neighbours, page
layout, chunking and thread count never enter. This package imports nothing else of rlloop. `ops` is what models use.
"""
