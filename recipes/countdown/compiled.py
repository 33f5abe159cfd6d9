"""Operations under torch.compile, for an engine of the collapse study (`arm=compiled`): each as Inductor makes it.

One operation is compiled at a time, since attention and sampling lie between: results are rounded where they pass from
one to the next, and not within, where PyTorch's own kernels round each.
"""

from __future__ import annotations

import functools

import torch

from rlloop.numerics import stock

torch._dynamo.config.recompile_limit = 64  # sizes that are equal by chance, and a row alone, are code of their own
_compiled = functools.partial(torch.compile, dynamic=True, fullgraph=True)

linear = _compiled(stock.linear)
rms_norm = _compiled(stock.rms_norm)
silu_mul = _compiled(stock.silu_mul)
rope = _compiled(stock.rope)
