"""The contracts as CPU kernels: numba with explicit lanes, no C compiler needed. `contract.py` wraps them for torch."""
