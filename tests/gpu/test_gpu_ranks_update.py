"""The update on several GPUs: weights, optimizer state and everything reported have the bytes of one GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.gpu_models import need_gpus
from tests.support.gpu_runs import KINDS, SHARED
from tests.support.image_models import image_config
from tests.support.rank_updates import Case, digests_of, go, live, ranked, save
from tests.support.ranks import run_ranks
from tests.support.train_sequences import VOCAB

assert SHARED["vocab_size"] >= VOCAB, "the batches' tokens are below VOCAB"
ROPE = {"rope_type": "default", "rope_theta": 1000.0, "mrope_interleaved": True, "mrope_section": [12, 10, 10]}
SEEING = image_config(
    "qwen3_vl",
    {"hidden_size": 256, "head_dim": 64, "rope_parameters": ROPE},
    {"hidden_size": 288, "num_heads": 4, "intermediate_size": 384, "out_hidden_size": 256},
)
TIED = {**SHARED, **KINDS["dense"], "tie_word_embeddings": True}
CASES = {
    "dense": Case({**SHARED, **KINDS["dense"]}, "bfloat16", {"checkpoint_layers": "all"}),
    "tied": Case(TIED, "bfloat16"),
    "tied float32": Case(TIED),
    "experts": Case({**SHARED, **KINDS["mixture"]}, "bfloat16", {"balance_coef": 0.1}),
    "latent": Case({**SHARED, **KINDS["latent"]}, "bfloat16", {"expert_bias_rate": 0.01}),
    "reference": Case({**SHARED, **KINDS["dense"]}, "bfloat16", reference=True),
    "adapter": Case({**SHARED, **KINDS["dense"]}, "bfloat16", adapter=("all-linear", "lm_head"), reference=True),
    "pictures": Case(SEEING, "bfloat16", pictures=True),
    "adapter of experts": Case({**SHARED, **KINDS["mixture"]}, "bfloat16", adapter=("all-linear",)),
}
LONG = ("dense", "experts")  # those of 20 steps, with the first layout of each size
LAYOUTS = {  # layers: with trainer.shard=parameters
    1: [{}],
    2: [{"dp_shard": 2}, {"dp_replicate": 2}, {"dp_shard": 2, "layers": 1}],
    3: [{"dp_shard": 3}, {"dp_shard": 3, "layers": 1}],
    4: [{"dp_shard": 4}, {"dp_shard": 2, "dp_replicate": 2, "layers": 1}],
    8: [{"dp_shard": 8}, {"dp_shard": 4, "dp_replicate": 2, "layers": 1}],
}


def trained(folder: Path, size: int) -> dict[str, tuple[str, dict[str, str], str]]:
    """By steps, case and layout: digests of what is reported, of what is saved and of the live weights."""
    found: dict[str, Any] = {}
    runs = [(name, layout, 3) for name in CASES for layout in LAYOUTS[size]]
    for name, layout, steps in [*runs, *((name, LAYOUTS[size][0], 20) for name in LONG)]:
        case, key = CASES[name], f"{steps} steps of {name} with {layout}"
        trainer = ranked(case, layout, f"cuda:{torch.cuda.current_device()}")
        reported = digests_of(go(trainer, case, range(steps)))
        found[key] = (reported, save(trainer, folder / key), live(trainer))
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    [found] = run_ranks(1, trained, tmp_path_factory.mktemp("alone"), 1, kind="cuda")
    return {key.partition(" with ")[0]: result for key, result in found.items()}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_gpus_have_the_bytes_of_one(alone: dict[str, Any], tmp_path: Path, size: int) -> None:
    need_gpus(size)
    for rank, found in enumerate(run_ranks(size, trained, tmp_path, size, kind="cuda")):
        assert len(found) == len(CASES) * len(LAYOUTS[size]) + len(LONG)
        different = [key for key, result in found.items() if result != alone[key.partition(" with ")[0]]]
        assert not different, f"rank {rank}: not the bytes of one GPU"


def test_a_rows_squares_do_not_depend_on_other_rows() -> None:
    from rlloop.numerics.kernels import kernels_for

    kernel = kernels_for(torch.device("cuda")).squares_of_rows
    for width in (1, 24, 1000, 4096, 12288):
        x = torch.randn(333, width, device="cuda")
        whole = kernel(x)
        torch.testing.assert_close(whole, x.double().square().sum(-1))
        for begin, end in ((0, 1), (7, 8), (5, 100), (100, 333)):
            assert torch.equal(kernel(x[begin:end]), whole[begin:end])


def test_adamw_does_not_know_where_a_shard_ends() -> None:
    from rlloop.trainer.shard import VECTOR

    weights, gradients = torch.randn(2, 64 * 1000, device="cuda").unbind()

    def stepped(begin: int, end: int) -> torch.Tensor:
        weight = torch.nn.Parameter(weights[begin:end].clone())
        weight.grad = gradients[begin:end].clone()
        optimizer = torch.optim.AdamW([weight], lr=1e-3, weight_decay=0.1, fused=True)
        for _ in range(3):
            optimizer.step()
        state = optimizer.state[weight]
        return torch.stack([weight.detach(), state["exp_avg"], state["exp_avg_sq"]])

    whole = stepped(0, len(weights))
    for cut in (VECTOR, 3 * VECTOR, 999 * VECTOR, 3999 * VECTOR):
        assert torch.equal(torch.cat([stepped(0, cut), stepped(cut, len(weights))], 1), whole)
