"""The canaries of fleet=regions, which the trainer's own engines make in a cache of their size."""

import pytest

from rlloop import Engine, SamplingParams
from rlloop.launch.regions import Reference, _tokens
from tests.support.tiny_models import tiny_qwen3


@pytest.mark.parametrize("page", [16, 64, 1000])
def test_a_canary_fits_into_its_cache_whatever_the_page(page: int) -> None:
    prompts, sampling = [list(range(5, 40)), [7]], [SamplingParams(max_tokens=9, seed=1), SamplingParams(max_tokens=4)]
    for some in (0, 1, 2):
        tokens = _tokens(prompts[:some], sampling[:some], page)
        engine = Engine(tiny_qwen3(), page_size=page, max_cache_tokens=tokens)
        reference = Reference(engine, "cpu", prompts[:some], sampling[:some], tokens - tokens % page)
        canary = reference.canary(3)
        assert engine.policy_version == 3
        assert [each.policy_version for each in canary.expected or ()] == [3] * some if canary else some == 0
        holds = min(reference.longest, engine.limits.positions - 1)
        assert list(map(len, reference.prefill_logprobs([[5] * holds]) or [])) == [holds - 1]
        assert reference.prefill_logprobs([[5], [5] * (reference.longest + 1)]) is None
