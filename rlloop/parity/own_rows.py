"""A context-parallel rank's results beside an engine's, which has all tokens of all heads.

Such a rank computes single tokens' results for its own range of the tokens, and attention, convolutions and scans for
all tokens of its own heads (`rlloop.models.context_parallel`).
"""

from __future__ import annotations

import re

from torch import Tensor

from rlloop.models import Model
from rlloop.models.attention import Attention
from rlloop.models.latent import LatentAttention
from rlloop.models.recurrent import DeltaNet, Mamba
from rlloop.parallel.cut import share
from rlloop.parallel.division import Division, heads_over


def own_rows(whole: Tensor, like: Tensor, where: str, trainer: Model) -> tuple[Tensor, int] | None:
    """The part of the engine's result `whole` [T, ...] that the trainer's rank has as `like`, and its first token.

    `where`: the module's name. None where the two do not compare: an engine's rank may have another part.
    """
    cp = trainer.context.ranks("cp")
    begin, end = share(len(whole), cp.size, cp.rank)
    if (own := whole[begin:end]).shape == like.shape:
        return own, begin
    if len(whole) != len(like) or whole.ndim < 2:
        return None
    for heads in _heads(trainer, where):
        if (heads.count, heads.size) == (whole.shape[1], like.shape[1]):
            return heads.take(whole, 1), 0
    return (whole, 0) if whole.shape == like.shape else None  # an engine cut by tp into as many parts, of equal heads


def _heads(model: Model, where: str) -> list[Division]:
    """Divisions over context-parallel ranks of what mixes tokens in the layer of this name: heads, or channels."""
    cp, config, divisions = model.context.ranks("cp"), model.config, []
    layer = re.match(r"model\.layers\.(\d+)", where)
    for module in () if layer is None else model.model.layers[layer[1]].children():
        if isinstance(module, Attention | LatentAttention):
            groups = config.num_kv_heads if isinstance(module, Attention) else 1
            divisions += heads_over(config.num_heads, groups, cp) or ()
        if isinstance(module, DeltaNet | Mamba):
            channels = module.spread(cp)
            divisions += [channels.values, channels.keys, channels.mixed]
    return [each for each in divisions if each is not None]
