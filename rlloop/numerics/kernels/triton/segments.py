"""Sizes in which attention cuts the keys, in every phase and kernel: part of the contract."""

TILE = 64  # keys of a step of the online softmax, at absolute positions
WIDE_TILE = 128  # the same where keys and values have 64 to 128 numbers of 16 bits, no window and no sinks
SEGMENT = 1024  # keys after which the softmax begins anew
SLACK = 8.0  # log2 by which a score may exceed what masses are relative to, before they are made relative to it
