"""Layouts that cannot be are refused by the command before anything is written, compiled, made or trained."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from rlloop.cli.main import main
from rlloop.cli.train import _make_jobs
from rlloop.errors import ConfigError
from rlloop.launch import ray_actors, rehearsal, run
from rlloop.launch.compose import build, compose_recipe
from rlloop.launch.layouts import Machine, check_launch, check_model
from rlloop.launch.prepare import prepare
from rlloop.models.config import parse_config, read_config
from rlloop.protocols import MakesModel
from rlloop.recipes.guess.task import Guess
from rlloop.recipes.random.task import RandomModel
from tests.support.tiny_run import make_model

RAY = "launch=ray"
OBSERVED = "parity.mode=observe"
OWN_MODEL = {  # what a recipe's own model does not hold: its layout, and the message
    "random": ("trainer.layout.tp=64", "tp is 64, and ranks split layers of 32 heads; set trainer.layout.tp=32"),
    "countdown": ("trainer.layout.pp=4 rollout.layout.pp=4", "pp is 4, and there are 3 layers; set trainer"),
    "calculator": ("trainer.layout.cp=5", "cp is 5, and ranks split layers of 4 heads; set trainer.layout.cp=1"),
    "guess": ("trainer.layout.dp_shard=2 trainer.layout.ep=2", "ep is 2, and there are no experts"),
    "images": ("trainer.layout.tp=6", "tp is 6, and ranks split layers of 4 heads; set trainer.layout.tp=3, trainer"),
}  # fmt: skip
NO_MODEL = [
    ("trainer.layout.cp=2 trainer.layout.tp=2", "trainer.layout does not fit any model: cp is 2 and tp 2"),
    ("rollout.layout.cp=2", "rollout.layout does not fit any model: cp is 2, and an engine does not split sequences"),
    ("trainer.layout.tp=2 trainer.layout.dp_shard=3 trainer.layout.ep=3", "ep is 3, which neither divides tp"),
    ("trainer.layout.dp_shard=4 rollout.layout.tp=3", "which leaves 1 of the 4 over"),
    ("trainer.layout.tp=2 ray.address=ray://somewhere:10001", "is a client's, and ranks meet in the process"),
    ("device=cuda trainer.layout.dp_shard=3", "need 3 GPUs, and this machine has 2"),
]


@pytest.fixture(autouse=True)
def untouched(tmp_path, monkeypatch):
    """The cache and the working folder, which stay empty; nothing is compiled and Ray is not asked for."""

    def reached(*args):
        raise AssertionError("the run went on")

    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("RLLOOP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for module in (run, rehearsal):
        monkeypatch.setattr(module, "compile_if_new", reached)
    monkeypatch.setattr(ray_actors, "import_ray", reached)
    yield
    assert not list(Path().iterdir())
    assert not (tmp_path / "cache").exists() or not list((tmp_path / "cache").iterdir())


@pytest.mark.parametrize("dry", [(), ("--dry-run",)], ids=["run", "dry run"])
@pytest.mark.parametrize("recipe", OWN_MODEL)
def test_what_the_recipes_own_model_cannot_hold(recipe, dry, capsys):
    layout, said = OWN_MODEL[recipe]
    assert main(["train", recipe, "run.dir=run", "device=cpu", RAY, *layout.split(), *dry]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("dry", [(), ("--dry-run",)], ids=["run", "dry run"])
@pytest.mark.parametrize(("layout", "said"), NO_MODEL)
def test_what_no_model_or_machine_has(layout, said, dry, capsys):
    assert main(["train", "countdown", "run.dir=run", RAY, *layout.split(), *dry]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("dry", [(), ("--dry-run",)], ids=["run", "dry run"])
@pytest.mark.parametrize(
    ("layout", "said"),
    [
        ("", "trainer.layout (one rank) keeps 106.8 GiB of weights, masters and moments on a GPU, which has 80.0; set"),
        ("launch=ray trainer.layout.dp_replicate=2", "--model FOLDER --gpus 2, of a folder with config.json"),
        ("launch=ray ray.address=somewhere:6379", "the run went on"),  # its GPUs are unknown here
    ],
)
def test_what_a_gpu_has_no_room_for_is_not_made(layout, said, dry, capsys, monkeypatch):
    """Of 80 GiB, for weights, masters and moments of an 8B model."""
    for module in ("layouts", "prepare"):
        monkeypatch.setattr(f"rlloop.launch.{module}.usable_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=80 << 30))
    command = ["train", "random", "run.dir=run", "device=cuda", *layout.split(), *dry]
    if "address" in layout:
        with pytest.raises(AssertionError, match=said):
            main(command)
    else:
        assert main(command) == 2
        assert said in capsys.readouterr().err


def test_what_a_given_model_cannot_hold(tmp_path, capsys):
    make_model(tmp_path)
    assert main(["train", "countdown", f"model.path={tmp_path}/model", "run.dir=run", RAY, "trainer.layout.tp=4"]) == 2
    assert "tp is 4, and ranks split layers of 2 heads; set trainer.layout.tp=2" in capsys.readouterr().err


@pytest.mark.parametrize(
    "layouts",
    [
        "trainer.layout.pp=4",  # of countdown's 3 layers
        "trainer.layout.pp=4 rollout.layout.pp=4",
        "trainer.layout.pp=4 trainer.layout.dp_shard=3 rollout.layout.tp=4",
        "trainer.layout.pp=6 rollout.layout.dp_replicate=12",
        "trainer.layout.pp=4 trainer.layout.cp=8 rollout.layout.tp=8",
        "trainer.layout.dp_shard=6 rollout.layout.pp=6",
    ],
)
def test_the_layouts_that_are_advised_are_not_refused_in_turn(layouts, capsys):
    """Started on as many ranks: each advice is followed once."""

    def checked(overrides: list[str]) -> int:
        config = build(compose_recipe("countdown", overrides))
        check_launch(config, size)
        check_model(config, model)
        return config.world.size

    task = prepare(build(compose_recipe("countdown", ["device=cpu"]))).task
    assert isinstance(task, MakesModel)
    model, given = parse_config(task.model_config()), layouts.split()
    size = build(compose_recipe("countdown", given)).world.size
    with pytest.raises(ConfigError) as refused:
        checked(given)
    advice = str(refused.value).rpartition("; set ")[2].split(", ")
    assert checked([*given, *advice]) == size


@pytest.mark.parametrize(
    ("setting", "named"),
    [("trainer.shard=parameters", "trainer.shard=parameters is"), ("algorithm=ppo_critic", "algorithm.critic is")],
)
def test_what_does_not_go_with_stages_goes_with_the_layout_that_is_advised(setting, named):
    given = ["trainer.layout.pp=4", "rollout.layout.pp=2", setting]
    with pytest.raises(ConfigError, match=f"{named} not for a pipeline") as refused:
        build(compose_recipe("countdown", given))
    advice = str(refused.value).rpartition("; set ")[2].partition(", or ")[0].split(" and ")
    assert build(compose_recipe("countdown", [*given, *advice])).world.size == 4


@pytest.mark.parametrize(
    ("heads", "tp", "said"),
    [
        ((6, 6), 4, "in equal parts, which has 6 query heads; set tp to a number that divides them"),
        ((12, 6), 4, "in equal parts, which has 6 key-value heads"),
        ((12, 3), 4, "each of the 3 key-value heads of Qwen3ForCausalLM lies on equally many ranks"),
        ((4, 4), 4, None),
        ((4, 2), 4, None),
    ],
)
def test_what_vllms_own_model_cannot_hold(heads, tp, said, tmp_path):
    make_model(tmp_path, num_attention_heads=heads[0], num_key_value_heads=heads[1], head_dim=32)
    model = read_config(tmp_path / "model")
    if said is None:
        check_model(in_vllm("vllm_stock", tp), model)
    else:
        with pytest.raises(ConfigError, match=said):
            check_model(in_vllm("vllm_stock", tp), model)


def test_vllms_own_model_has_an_expert_for_each_rank(tmp_path):
    mixture = {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 2, "num_experts_per_tok": 1,
        "moe_intermediate_size": 64,
    }  # fmt: skip
    make_model(tmp_path, num_attention_heads=4, head_dim=32, **mixture)
    model = read_config(tmp_path / "model")
    check_model(in_vllm("vllm_stock", 2), model)
    check_model(in_vllm("vllm", 4), model)
    with pytest.raises(ConfigError, match="set tp to at most 2, or rollout"):
        check_model(in_vllm("vllm_stock", 4), model)


def in_vllm(engine, tp):
    return build(compose_recipe("countdown", [f"rollout.layout.tp={tp}", f"rollout.engine={engine}", OBSERVED]))


@pytest.mark.parametrize("dry", [(), ("--dry-run",)], ids=["run", "dry run"])
def test_heads_that_vllms_kernel_lacks(dry, capsys, monkeypatch):
    """On one rank as well, before the recipe's model is made."""
    monkeypatch.setattr("rlloop.rollout.vllm.versions.problems", list)
    stock = ["rollout.engine=vllm_stock", "parity.mode=observe"]
    assert main(["train", "countdown", "run.dir=run", *stock, *dry]) == 2
    said = capsys.readouterr().err
    assert "kernel for attention knows head_dim=32, 48" in said
    assert "this model has 16. rollout.engine=vllm runs it" in said


@pytest.mark.parametrize("dry", [(), ("--dry-run",)], ids=["run", "dry run"])
def test_a_missing_vllm_is_named_before_ray_starts(dry, capsys, monkeypatch):
    monkeypatch.setattr("rlloop.rollout.vllm.versions.installed", lambda: None)
    assert main(["train", "countdown", "run.dir=run", "rollout.engine=vllm", RAY, "rollout.layout.tp=2", *dry]) == 2
    assert "rollout.engine needs vLLM: vLLM is not installed" in capsys.readouterr().err


@dataclass
class Leading:
    """Rank 0 of torchrun, up to the refusal."""

    here: SimpleNamespace
    others: tuple[Machine, ...] = ()

    def machines(self):
        return [Machine(0, "first", 0, self.here.neighbours, 2), *self.others]

    def parts(self, *args):
        raise AssertionError("the run went on")


@pytest.mark.parametrize(
    ("layout", "here", "said"),
    [
        ("trainer.layout.tp=8", 8, "tp is 8, and ranks split layers of 4 heads; set trainer.layout.tp=4"),
        (
            "trainer.layout.dp_shard=4 device=cuda",
            4,
            r"4 processes on first \(rank 0 has index 0\), which has 2",
        ),
        ("trainer.layout.tp=8 device=cuda", 2, "tp is 8"),  # on four machines of two GPUs
        ("trainer.layout.tp=8 device=cuda", None, "tp is 8"),
    ],
)
def test_torchruns_ranks_are_refused_alike(layout, here, said, monkeypatch):
    monkeypatch.setattr("rlloop.launch.prepare.usable_device", lambda name: None)
    [job] = _make_jobs("countdown", [("", ["run.dir=run", *layout.split()])])
    leader = Leading(SimpleNamespace(size=job.config.world.size, neighbours=here))
    with pytest.raises(ConfigError, match=said):
        run.train(job, Console(quiet=True), leader)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (
            Machine(3, "second", 1, 2, 1),
            r"2 processes on second \(rank 3 has index 1\), which has 1 GPU, and",
        ),
        (Machine(2, "second", 0, 2, 0), "second, where rank 2 runs, has no GPU; leave it out, or"),
        (Machine(3, "second", 1, None, 1), "more processes on second"),
        (Machine(3, "second", 1, 2, 2), "tp is 8"),
    ],
)
def test_torchruns_other_machines_are_named(other, said, monkeypatch):
    monkeypatch.setattr("rlloop.launch.prepare.usable_device", lambda name: None)
    [job] = _make_jobs("countdown", [("", ["run.dir=run", "device=cuda", "trainer.layout.tp=8"])])
    leader = Leading(SimpleNamespace(size=8, neighbours=2), (other,))
    with pytest.raises(ConfigError, match=said):
        run.train(job, Console(quiet=True), leader)  # type: ignore[arg-type]


@pytest.mark.parametrize("recipe", OWN_MODEL)
def test_recipes_tell_what_they_make(recipe):
    task = prepare(build(compose_recipe(recipe, ["device=cpu"]))).task
    assert isinstance(task, MakesModel)
    parse_config(task.model_config())


def test_what_is_made_is_what_was_told(tmp_path, monkeypatch):
    monkeypatch.setenv("RLLOOP_CACHE", str(tmp_path / "made"))
    make_model(tmp_path)
    shape = read_config(tmp_path / "model").raw
    for task in (Guess(0), RandomModel(0, config=shape, prompt_tokens=4)):
        assert read_config(task.model_folder()) == parse_config(task.model_config())
