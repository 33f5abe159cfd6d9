"""Training on pictures with CUDA: an adapter beside its base, a tower that is frozen, and the recipe."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rlloop import Engine, SamplingParams, load_adapter, load_model, token_logprobs
from rlloop.algorithms import get_loss
from rlloop.cli.main import main
from rlloop.config.trainer import TrainerConfig
from rlloop.models import Model
from rlloop.models.adapter_weights import Adapter, choose_targets, fresh_weights
from rlloop.numerics.probe import same_bits
from rlloop.runs.folder import read_records
from rlloop.trainer import Trainer
from tests.support.adapters import adapter_folder
from tests.support.image_models import FAMILIES, wide_prompts
from tests.support.samples import as_sample, different
from tests.support.traffic import bits

pytestmark = pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")
TRAINED = ("qwen3_vl", "qwen3_5_moe")  # features of deepstack; recurrent layers and experts
RECIPE = [
    "train", "--config-name", "images", "run.dir=run", "model.path=model", "reward._target_=learnable.reward",
    "rollout.num_prompts=4", "rollout.group_size=4", "trainer.num_steps=2", "eval.num_draws=2",
]  # fmt: skip


def check_rows(folder: Path, place: Path, device: str = "cuda") -> None:
    model = load_model(folder, dtype="bfloat16", device=device).requires_grad_(False)
    load_adapter(model, adapter_folder(place, model, 0, rank=12), "a")
    prompts = wide_prompts()
    sampling = [
        SamplingParams(8 + i % 5, seed=i, temperature=(1.0, 0.7, 0.0)[i % 3], ignore_eos=True)
        for i in range(len(prompts))
    ]
    names = [None if index % 3 == 2 else "a" for index in range(len(prompts))]
    base, made = (Engine(model).generate(prompts, sampling, adapters=each) for each in (None, names))
    cut = Engine(model, max_batch_tokens=48, page_size=64, prefix_caching=False)
    assert list(map(bits, cut.generate(prompts, sampling, adapters=names))) == list(map(bits, made))
    for plain, each, prompt, params, name in zip(base, made, prompts, sampling, names, strict=True):
        assert (bits(plain) == bits(each)) == (name is None)
        (row,) = token_logprobs(model, [(prompt, each.token_ids)], sampling=[params], adapter=name)
        assert different([as_sample(0, each, 0.0)], [row.detach().cpu().numpy()]) == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_of_an_adapter_beside_rows_of_the_base(folders: dict[str, Path], family: str, tmp_path: Path) -> None:
    check_rows(folders[family], tmp_path)


def check_updates(model: Model, settings: TrainerConfig) -> set[str]:
    """The names of the weights that two updates leave as they were."""
    engine, trainer, prompts = Engine(model), Trainer(model, settings), wide_prompts()
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    rng = np.random.default_rng(0)
    for step in range(2):
        sampling = [SamplingParams(16, seed=100 * step + i, ignore_eos=True) for i in range(len(prompts))]
        samples = [as_sample(i, c, float(rng.normal())) for i, c in enumerate(engine.generate(prompts, sampling))]
        assert different(samples, trainer.forward_backward(samples, get_loss("grpo")).logprobs) == 0
        assert trainer.optim_step()["loss/grad_norm"] > 0
        assert different(samples, trainer.logprobs(samples)) > 50
        engine.set_version(step + 1)
    return {name for name, weight in model.named_parameters() if same_bits(weight.detach(), before[name])}


def check_adapter(folder: Path, device: str = "cuda") -> None:
    model = load_model(folder, dtype="bfloat16", device=device).requires_grad_(False)
    chosen = choose_targets(model.adapter_targets(), ["all-linear"])
    adapter = Adapter(fresh_weights(chosen, 12, 24.0, 0), chosen)
    same = check_updates(model.with_adapter(adapter), TrainerConfig(lr=1e-2, max_batch_tokens=1500))
    assert same == {name for name, _ in model.named_parameters()}


@pytest.mark.parametrize("family", TRAINED)
def test_an_adapter_trains_and_its_base_stays(folders: dict[str, Path], family: str) -> None:
    check_adapter(folders[family])


def check_frozen(folder: Path, device: str = "cuda") -> None:
    model = load_model(folder, dtype="bfloat16", device=device)
    same = check_updates(model, TrainerConfig(lr=3e-3, max_batch_tokens=1500, freeze_vision_tower=True))
    names = {name for name, _ in model.named_parameters()}
    tower = {name for name in names if name.startswith("visual.")}
    assert any("merger" in name for name in tower)
    assert tower <= same
    assert len(same - tower) < 0.1 * len(names - tower)  # experts that no token came to


@pytest.mark.parametrize("family", TRAINED)
def test_a_frozen_tower_stays_and_the_text_trains(folders: dict[str, Path], family: str) -> None:
    check_frozen(folders[family])


def check_recipe(device: str = "cuda", *overrides: str) -> None:
    from rlloop.recipes.images.warm_start import write_model  # needs Pillow, and the other tests do not

    write_model(Path("model"))
    assert main([*RECIPE, f"device={device}", *overrides]) == 0
    steps = list(read_records(Path("run/metrics.jsonl")))[1:]
    for name in ("tokens_different", "prompt_tokens_different", "k3", "k3_image", "k3_text"):
        assert [step[f"parity/{name}"] for step in steps] == [0.0, 0.0], name
    assert all(step["parity/tokens"] > 16 and step["parity/prompt_tokens"] > 16 for step in steps)
    assert all(step["loss/grad_norm"] > 0 for step in steps)


@pytest.mark.usefixtures("working_folder")
@pytest.mark.parametrize("overrides", [[], ["model.lora.rank=4", "trainer.lr=1e-2"]], ids=["whole", "an adapter"])
def test_the_recipe_has_no_differing_token(overrides: list[str]) -> None:
    check_recipe("cuda", *overrides)
