"""rlloop's model inside vLLM on a GPU: the embedded engine's tokens and logprobs, before and after an update."""

import pytest

from rlloop.models import token_logprobs
from rlloop.rollout.engine import Engine
from tests.gpu.test_gpu_mixture import model_of, traffic

pytest.importorskip("vllm", reason="vLLM 0.26 is not installed")


@pytest.mark.filterwarnings("ignore")  # vLLM's own
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_vllm_samples_the_embedded_engine_s_bits(family):
    from rlloop.rollout.vllm.engine import VllmEngine

    model = model_of(family, "bfloat16")
    prompts, sampling = traffic(40)
    engine = VllmEngine(model, max_cache_tokens=8192)
    try:
        for version in (0, 1):
            expected = Engine(model).generate(prompts, sampling)
            made = engine.generate(prompts, sampling)
            assert [c.token_ids for c in made] == [c.token_ids for c in expected]
            scored = token_logprobs(model, [(c.prompt_ids, c.token_ids) for c in made], sampling=sampling)
            for a, b, c in zip(made, expected, scored, strict=True):
                assert a.logprobs.tobytes() == b.logprobs.tobytes() == c.detach().cpu().numpy().tobytes()
                assert a.raw_logprobs.tobytes() == b.raw_logprobs.tobytes()
            model.model.norm.weight.data.mul_(1.25)  # in place, as an update is
            engine.set_version(version + 1)
    finally:
        engine.close()
