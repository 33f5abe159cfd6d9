"""Sizes in which attention cuts the keys, in every phase and kernel: part of the contract."""

TILE = 64  # keys of a step of the online softmax, at absolute positions
SEGMENT = 1024  # keys after which the softmax begins anew
