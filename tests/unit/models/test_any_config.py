"""Configurations of every family with nonsense in them."""

from __future__ import annotations

import math
import re

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlloop.errors import ModelError
from rlloop.models.config import parse_config
from rlloop.models.transformer import Model
from tests.support.checkpoints import EVERY
from tests.support.raw_config import raw

NONSENSE = (
    None, True, False, 0, 1, 2, 3, 7, -1, 2**24, 10**30, 1.0, 0.5, -0.5, 1e-300, 1e300, math.nan, math.inf, "1", "", [],
    [1], ["full_attention"], [None, {}], [True, True], {}, {"a": 1},
)  # fmt: skip
UNWRITTEN = (
    "rope_theta", "rope_scaling", "partial_rotary_factor", "rotary_dim", "index_topk_pattern", "index_topk_freq",
    "hybrid_override_pattern", "full_attention_interval", "num_nextn_predict_layers", "quantization_config",
)  # fmt: skip
FAMILIES = {family: raw(family, vocab_size=8, max_position_embeddings=64) for family in EVERY}


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_config_is_a_model_or_refused_by_a_key(data):
    written = FAMILIES[data.draw(st.sampled_from(sorted(FAMILIES)))]
    for _ in range(data.draw(st.integers(1, 2))):
        inner = written.get("rope_parameters")
        if isinstance(inner, dict) and data.draw(st.booleans()):
            key = data.draw(st.sampled_from(sorted({*inner, "type"})))
            written = {**written, "rope_parameters": {**inner, key: data.draw(st.sampled_from(NONSENSE))}}
        else:
            key = data.draw(st.sampled_from(sorted({*written, *UNWRITTEN})))
            written = {**written, key: data.draw(st.sampled_from(NONSENSE))}
    try:
        config = parse_config(written)
    except ModelError as error:
        refused = str(error)
    else:
        with torch.device("meta"):
            Model(config)
        return
    assert re.search(r"config\.json.* [a-z.]+_[a-z_.]+|architectures|eos_token_id", refused), refused
