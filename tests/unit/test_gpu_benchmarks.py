"""What the benchmarks on GPUs do without one: cells, time limits, merged results, rooflines, requests, commands."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from rlloop.launch.compose import build, compose_recipe

ROOT = Path(__file__).parents[2]


TOY_JIT = """
import os
from pathlib import Path

from triton.runtime._async_compile import active_mode
from triton.runtime.driver import driver

launched = []


class JITFunction:
    def __init__(self, name, folder):
        self.name, self.folder = name, Path(folder)

    def run(self, *args, warmup=False, setting=0):
        key = f"{self.name}-{setting}"

        def compiled():
            if setting == 3:
                raise RuntimeError("out of resources")
            assert driver.active.get_current_target() == "gpu"
            (self.folder / f"{key}.compiled").write_text(str(os.getpid()))

        if active_mode.get() is not None:
            active_mode.get().submit(key, compiled, None)
        if not warmup:
            launched.append(key)
"""
TOY_AUTOTUNER = """
class Config:
    def __init__(self, setting):
        self.setting = setting

    def all_kwargs(self):
        return {"setting": self.setting}


class Autotuner:
    arg_names = ("x",)

    def __init__(self, fn, settings):
        self.fn, self.settings = fn, settings

    def prune_configs(self, named):
        assert self.nargs == {"x": 5}
        return [Config(setting) for setting in self.settings]

    def run(self, *args, **named):
        self.best_config = Config(1)
        self.fn.run(*args, **named, setting=1)
"""
TOY_SCRIPT = """
import os
import sys
from concurrent.futures import ThreadPoolExecutor

from triton.runtime import jit
from triton.runtime.autotuner import Autotuner

from compile_ahead import compile_ahead

add, scan, plain = (jit.JITFunction(name, sys.argv[1]) for name in ("add", "scan", "plain"))
tuned = [Autotuner(add, [3, 1, 2]), Autotuner(scan, [1, 2])]


def calls():
    for each in (*tuned, plain):
        each.run(5, warmup=False)
    assert tuned[0].best_config


def in_a_thread():
    with ThreadPoolExecutor() as threads:
        threads.submit(calls).result()


def refuses():
    raise RuntimeError("not here")


print(compile_ahead("toys", [in_a_thread, refuses]), "launched", len(jit.launched))
print(f"process {os.getpid()}", file=sys.stderr)
calls()
plain.run(5)
print("launched", len(jit.launched))
"""


def test_patterns_choose_cells(module):
    cells, every = module("cells"), module("gpu_engine").CELLS
    assert len(every) == 60
    assert cells.chosen(every, None) == every
    assert cells.chosen(every, ["mixture/one", "8B/*"]) == [
        *(f"8B/{w}" for w in module("gpu_engine").WORKS),
        "mixture/one",
    ]
    with pytest.raises(SystemExit, match="no cell is '8b/one'"):
        cells.chosen(every, ["8B/one", "8b/one"])


def test_a_time_limit_leaves_the_rest_for_another_run(module, capsys):
    within, groups = module("cells").within, {"small": ["small/a", "small/b"], "large": ["large/a"], "huge": ["huge/a"]}
    clock = iter([0.0, 0.0, 45.0, 90.0])
    assert list(within(groups, 100.0, clock=clock.__next__)) == ["small", "large"]  # another such would end at 135
    assert capsys.readouterr().err == "no time for the rest; go on with --cells huge/a\n"
    assert list(within(groups, 1.0, clock=iter([0.0, 0.0, 9.0]).__next__)) == ["small"]  # the first, however long
    assert list(within(groups, None)) == list(groups)
    capsys.readouterr()
    assert list(within({"4": ["4"], "16": ["16"]}, 1.0, iter([0.0, 0.0, 9.0]).__next__, option="--rates")) == ["4"]
    assert capsys.readouterr().err == "no time for the rest; go on with --rates 16\n"


def test_results_of_parts_are_merged_and_rounds_are_shown(module, tmp_path, monkeypatch):
    schema, page = module("results_schema"), module("page")
    monkeypatch.setattr(schema, "RESULTS", tmp_path)
    monkeypatch.setattr(page, "RESULTS", tmp_path)
    monkeypatch.setattr(sys, "argv", [str(ROOT / "benchmarks" / "gpu_engine.py"), "--cells", "8B/*"])

    def measured(name: str, rounds: list[float]) -> None:
        figure = schema.Figure.of_rounds(name, "tokens/s", rounds, "vLLM", [40.0, 20.0, 30.0], aim=1.0, roofline=200.0)
        schema.report("engine", [figure], device="a GPU", part=True)

    measured("8B, crowd", [50.0, 90.0, 70.0, 60.0])
    measured("8B, one", [8.0])
    measured("8B, crowd", [80.0, 90.0, 100.0])
    crowd, one = json.loads((tmp_path / "engine.json").read_text())
    assert (crowd["value"], crowd["spread"], crowd["ratio"]) == (90.0, [80.0, 100.0], 3.0)
    assert (crowd["peer_value"], crowd["peer_spread"], crowd["roofline"]) == (30.0, [20.0, 40.0], 200.0)
    assert (one["name"], one["value"]) == ("8B, one", 8.0)
    assert "CPUs" in one["host"]
    head, _, first, *_ = page.table(["engine"]).splitlines()
    assert head == "| measure | rlloop | compared with | ratio | aim | the device allows | run |"
    assert first == "| 8B, crowd | 90 (80 to 100) tokens/s | vLLM: 30 (20 to 40) | 3 | 1 | 200 | 1 |"


def test_a_record_has_counts_whole_and_a_command_to_copy(module, tmp_path, monkeypatch):
    schema, page = module("results_schema"), module("page")
    monkeypatch.setattr(schema, "RESULTS", tmp_path)
    monkeypatch.setattr(page, "RESULTS", tmp_path)
    monkeypatch.setattr(sys, "argv", [str(ROOT / "benchmarks" / "gpu_engine.py"), "--without", "vLLM batch-invariant"])
    figure = schema.Figure(name="compared", unit="logprobs", value=131072, peer="a peer: out of memory")
    schema.report("step", [figure], device="a GPU")
    [record] = json.loads((tmp_path / "step.json").read_text())
    assert record["command"] == "python benchmarks/gpu_engine.py --without 'vLLM batch-invariant'"
    assert page.table(["step"]).splitlines()[2] == "| compared | 131,072 logprobs | a peer: out of memory |  |  | 1 |"


def test_rooflines_are_what_memory_and_arithmetic_allow(module):
    roofline, shapes = module("roofline"), module("gpu_shapes")
    sizes = {shape: roofline.total_bytes(config) / 2e9 for shape, (_, config) in shapes.SHAPES.items()}
    expected = {"0.6B": 0.596, "4B": 4.02, "8B": 8.19, "14B": 14.77, "32B": 32.76, "mixture": 10.59, "moe": 2.2}
    expected |= {"8B-8": 2.79, "14B-16": 6.84, "32B-16": 9.36}
    assert sizes == pytest.approx(expected, rel=2e-3)
    rates, config = roofline.device_rates("NVIDIA H200"), shapes.SHAPES["8B"][1]
    assert rates == (4.8e12, 989e12)
    assert roofline.device_rates("CPU") is None
    # One request reads all weights but the table of embeddings for each token.
    read = roofline.total_bytes(config) - 2 * 151936 * 4096
    assert roofline.engine_speed(config, [(1, 2000)], 1, rates) == pytest.approx(4.8e12 / read, rel=0.02)
    # A token more for a batch costs a mixture experts, at most all of them.
    mixture = shapes.SHAPES["mixture"][1]
    layer = [roofline.layer_numbers(mixture, tokens) for tokens in (1, 2, 1000)]
    experts = [(numbers - layer[0]) / (3 * 2048 * 768) + 8 for numbers in layer]
    assert experts == pytest.approx([8, 15.5, 128])
    # Prompts that are shared are computed once.
    alone, shared = (roofline.engine_speed(config, [(512, 2)] * 8, n, rates) for n in (1, 8))
    assert 4 < shared / alone < 8
    assert roofline.train_speed(config, [(2048, 2048)], 989e12) == pytest.approx(989e12 / (6 * 7.9e9), rel=0.05)


def test_requests_have_the_lengths_that_their_regime_says(module):
    engine = module("gpu_engine")
    for work, (count, prompt, new) in {"crowd": (256, 128, 256), "few": (32, 128, 256), "one": (1, 128, 256)}.items():
        prompts, wanted = engine.requests_of(work, 3)
        assert (len(prompts), {*map(len, prompts)}, {*wanted}) == (count, {prompt}, {new})
    assert engine.sizes_of("long", 0) == [(8192, 256)] * 32
    prompts, wanted = engine.requests_of("groups", 1)
    assert len(prompts) == len(wanted) == 512
    assert len({tuple(ids) for ids in prompts}) == 64
    assert prompts[8] == prompts[15] != prompts[16]
    assert 64 <= min(map(len, prompts)) < 100 < 480 < max(map(len, prompts)) <= 512
    assert 32 <= min(wanted) < 60 < 990 < max(wanted) <= 1024
    assert engine.requests_of("groups", 1) == (prompts, wanted) != engine.requests_of("groups", 2)


def test_engines_take_turns_where_they_fit_on_the_gpu_together(module):
    engine, names, memory = module("gpu_engine"), ["rlloop", "vLLM default", "vLLM batch-invariant"], 150e9
    assert engine.together("8B", names, ["crowd", "one"], memory)
    assert not engine.together("8B", names, ["long"], memory)
    assert not engine.together("32B", names, ["one"], memory)
    assert 100 * 262144 < engine.cache_bytes("32B", ["long"], 1, memory) < 150e9 - 65.5e9
    assert engine.together("qwen3.5-moe", ["rlloop", "vLLM default"], ["crowd"], 80e9)
    assert engine.cache_bytes("nemotron", ["crowd"], 2, 80e9) > 256 * 3 * 8.6e6  # states of all requests


def test_recurrent_shapes_are_the_released_widths(module):
    shapes, released = module("gpu_shapes"), json.loads((ROOT / "tests" / "support" / "released.json").read_text())
    cut = {"layer_types", "num_hidden_layers", "hybrid_override_pattern"}
    given = shapes.RECURRENT["qwen3.5-moe"][1]["text_config"]
    whole = released["Qwen3.5-35B-A3B"]["config"]["text_config"]
    assert {name: given[name] for name in given.keys() - cut} == {name: whole[name] for name in given.keys() - cut}
    assert given["layer_types"] == whole["layer_types"][:8]
    given, whole = shapes.RECURRENT["nemotron"][1], released["Nemotron-3-Nano-30B-A3B"]["config"]
    assert {name: given[name] for name in given.keys() - cut} == {name: whole[name] for name in given.keys() - cut}
    assert whole["hybrid_override_pattern"].startswith(given["hybrid_override_pattern"])
    weights, token, state = shapes.bytes_of("qwen3.5-moe")
    assert weights / 2e9 == pytest.approx(7.75, rel=0.01)
    assert (token, state > 6 * 32 * 128 * 128 * 4) == (2 * 2 * 2 * 256 * 2, True)


def test_tables_are_listed_and_have_commands_that_their_scripts_take(module):
    tables = module("gpu_tables")
    assert {Path(table.script).stem for table in tables.TABLES.values()} == MEASURING
    listed = tables.listing(gpus=1).splitlines()
    assert [line.split()[0] for line in listed[1:]] == list(tables.TABLES)
    assert "needs 2 GPUs, and there are 1" in listed[-1]
    assert tables.lacks(tables.TABLES["linear"], gpus=1) is None
    for table in tables.TABLES.values():
        assert (table.peer or "").lower() in table.what.lower(), f"{table.script} does not name {table.peer}"
        words = tables.command(table, 4, ["--more"])
        source = (ROOT / "benchmarks" / table.script).read_text()
        options = [word for word in table.arguments.split() + table.parts.replace(",", "").split() if word[0] == "-"]
        assert all(f'"{option}"' in source or "cells.add_arguments(" in source for option in options), table.script
        assert words[-1] == "--more"
    assert tables.command(tables.TABLES["ranks-products"], 4, [])[1:4] == [
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
    ]


SCRIPTS = {path.stem for name in ("gpu", "ranks") for path in (ROOT / "benchmarks").glob(f"{name}_*.py")}
SCRIPTS |= {"api_losses", "long_context", "offload", "shared_prompts"}
MEASURING = SCRIPTS - {"gpu_shapes", "gpu_study", "gpu_tables"}


@pytest.mark.parametrize("script", sorted(MEASURING))
def test_without_a_gpu_a_script_says_that_it_needs_one(module, script, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(sys, "argv", [f"benchmarks/{script}.py"])
    with pytest.raises(SystemExit, match=rf"^{script}.py needs \d GPUs?; PyTorch .* finds 0"):
        module(script).main()


def test_the_cpu_trainer_is_measured_in_turns_and_shows_its_rounds(module):
    train = module("train")
    asked, seconds = [], iter([9.0, 9.0, 2.0, 4.0, 1.0, 8.0])  # the first round of each is not counted

    class Side:
        def send(self, name):
            asked.append(name)

        def recv(self):
            return next(seconds)

    assert train.speeds(2, 8, (Side(), "mine"), (Side(), "theirs")) == [[4.0, 8.0], [2.0, 1.0]]
    assert asked == ["mine", "theirs"] * 3


def test_a_step_beside_a_publication_is_measured_on_a_cpu(module, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["benchmarks/gpu_delta.py", "--tiny", "--rounds", "1"])
    module("gpu_delta").main()
    assert "published beside it" in capsys.readouterr().out


def test_all_tables_on_a_machine_that_can_run_none_are_refused(module, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(sys, "argv", ["benchmarks/gpu_tables.py", "all"])
    with pytest.raises(SystemExit):
        module("gpu_tables").main()
    assert "this machine, with 0 GPUs, can run no table" in capsys.readouterr().err


def test_long_prompts_stand_beside_flash_attention_3_alone_where_it_is(module, monkeypatch):
    attention = module("gpu_attention")

    def seconds(works, recorded):
        for (call,) in works:
            call()
        return [[2.0] for _ in works]

    monkeypatch.setattr(attention, "DEVICE", "cpu")
    monkeypatch.setattr(attention, "seconds", seconds)
    monkeypatch.setattr(attention, "HEADS", {"toy": (2, 1, 16)})
    monkeypatch.setattr(attention, "LONG", (8,))
    monkeypatch.setattr(attention, "peers", lambda *given, **more: {"SDPA": [lambda: given]})
    assert {length for _, length in attention.PREFILL} >= {8192, 32768}
    for flash3, expected in (({}, [("SDPA", 0.75)] * 2), ({"FA3": [list]}, [("SDPA", 0.75), ("FA3", 0.9)])):
        monkeypatch.setattr(attention, "flash3", lambda *given, flash3=flash3: dict(flash3))
        made = [attention.prefill("toy", 2, length) for length in (4, 8)]
        assert [(each.peer, each.aim) for each in made] == expected
        assert all(each.spread == each.peer_spread for each in made)


def test_attentions_gradients_stand_beside_the_peers_own(module, monkeypatch):
    attention, given = module("gpu_attention"), []

    def seconds(works, recorded):
        given.extend(call() for (call,) in works)
        return [[2.0] for _ in works]

    def peers(q, k, v, causal):
        return {"SDPA": [lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)]}

    monkeypatch.setattr(attention, "DEVICE", "cpu")
    monkeypatch.setattr(attention, "seconds", seconds)
    monkeypatch.setattr(attention, "HEADS", {"toy": (4, 2, 16)})
    monkeypatch.setattr(attention, "peers", peers)
    with torch.inference_mode():
        made = attention.gradients("toy", 2, 8)
    assert (made.peer, made.aim, made.unit) == ("SDPA", 0.75, "TFLOP/s")
    ours, theirs = given
    for mine, other in zip(ours, theirs, strict=True):
        other = other.transpose(1, 2).reshape(mine.shape)
        assert (mine - other).norm() < 2e-2 * other.norm()


def test_products_of_64_to_1024_rows_are_measured(module):
    linear = module("gpu_linear")
    made = [*linear.cases(linear.MIDDLE, linear.MODELS)]
    assert sorted({case.rows for case in made}) == [96, 128, 256, 512, 768]
    assert len(made) == 5 * 15
    figure = made[0].figure("cuBLAS", [1e-6, 2e-6, 4e-6], [2e-6], 0.95)
    assert (figure.unit, figure.ratio) == ("TFLOP/s", 1.0)
    assert figure.spread == pytest.approx((figure.value / 2, figure.value * 2))


def test_recurrences_name_the_peers_that_refuse(module, capsys):
    recurrent, peers = module("gpu_recurrent"), module("recurrent_peers")

    def refuses() -> None:
        raise RuntimeError("Triton on Hopper is wrong here")

    assert not peers.runs("a peer", refuses)
    assert "a peer does not run here: RuntimeError: ['Triton on Hopper is wrong here']" in capsys.readouterr().out
    first, second = recurrent.compared("scan", "ms", [2.0], {"one": [1.0]}, ["two"], aim=0.8)
    assert (first.peer, first.ratio, first.aim) == ("one", 0.5, 0.8)
    assert (second.peer, second.peer_value, second.aim) == ("two: does not run here", None, None)
    (alone,) = recurrent.compared("scan", "ms", [2.0], {}, [], aim=0.8)
    assert (alone.value, alone.peer) == (2.0, None)


def test_recurrences_are_recorded_before_a_worker_is_asked(module, capsys):
    recurrent, asked = module("gpu_recurrent"), []

    class Worker(contextlib.nullcontext):
        triton = "2.0"

        def elapsed(self) -> float:
            return 4.0

    def first(peer):
        asked.append(peer)
        return Worker() if peer == "late" else None

    def refuses() -> None:
        raise RuntimeError("not here")

    calls = {"early": list, "late": refuses, "never": refuses}
    shown = []
    for figures in recurrent.growing("scan", list, calls, first):
        shown.append(([*asked], [each.peer for each in figures]))
    never = "never: does not run here"
    assert shown == [
        ([], ["early"]),
        ([], ["early", "late: does not run here", never]),
        (["late"], ["early", "late with Triton 2.0", never]),
    ]
    assert asked == ["late", "never"]
    assert "scan: late in a process of its own" in capsys.readouterr().err
    ((alone,),) = recurrent.growing("scan", list, {}, first)
    assert alone.peer is None


def test_every_setting_of_an_autotuner_is_compiled_ahead_and_nothing_is_launched(module, tmp_path):
    """A toy of what Triton does when a kernel is called, in a process of its own: compiled, it leaves a file."""
    runtime = tmp_path / "triton" / "runtime"
    runtime.mkdir(parents=True)
    (tmp_path / "triton" / "__init__.py").touch()
    (runtime / "__init__.py").touch()
    (runtime / "_async_compile.py").write_text(
        "from contextvars import ContextVar\n\nactive_mode = ContextVar('mode', default=None)\n"
    )
    (runtime / "driver.py").write_text(
        "class driver:\n    class active:\n        get_current_target = staticmethod(lambda: 'gpu')\n"
    )
    (runtime / "jit.py").write_text(TOY_JIT)
    (runtime / "autotuner.py").write_text(TOY_AUTOTUNER)
    (tmp_path / "script.py").write_text(TOY_SCRIPT)
    path = os.pathsep.join([str(tmp_path), str(ROOT / "benchmarks")])
    done = subprocess.run(
        [sys.executable, tmp_path / "script.py", tmp_path], capture_output=True, text=True, timeout=240, check=True,
        env=os.environ | {"PYTHONPATH": path},
    )  # fmt: skip
    assert done.stdout.split() == ["6", "launched", "0", "launched", "4"]
    assert "toys: not compiled ahead from here: RuntimeError: not here\n" in done.stderr
    assert "toys: compiling 6 kernels in " in done.stderr
    compiled = {path.name: path.read_text() for path in tmp_path.glob("*.compiled")}
    assert sorted(compiled) == [f"{name}.compiled" for name in ("add-1", "add-2", "plain-0", "scan-1", "scan-2")]
    assert all(pid not in done.stderr for pid in compiled.values())  # which names the process that called them


@pytest.mark.slow
def test_a_peer_that_refuses_is_tried_with_another_triton(module, tmp_path, monkeypatch, capsys):
    """Toys of Triton and of flash-linear-attention: the latter runs with the second of two releases."""
    worker = module("recurrent_worker")
    ops = tmp_path / "peers" / "fla" / "ops"
    for package, runs in (("gated_delta_rule", "chunk_gated_delta_rule"), ("simple_gla", "chunk_simple_gla")):
        (ops / package).mkdir(parents=True)
        (ops / package / "__init__.py").write_text(
            "import triton\n\n"
            f"def {runs}(q, k, v, g, scale, cu_seqlens, beta=None):\n"
            "    print('not an answer')\n"
            "    if triton.__version__ == '1.0':\n"
            "        raise RuntimeError('wrong with 1.0')\n"
            "    factor = g.exp()[..., None] * (q.sum() + k.sum()) * (1 if beta is None else beta[..., None])\n"
            "    return v * factor.to(v.dtype), None\n"
        )
    for release in ("1.0", "2.0"):
        (tmp_path / release / "triton").mkdir(parents=True)
        (tmp_path / release / "triton" / "__init__.py").write_text(f"__version__ = '{release}'\n")
    path = [str(tmp_path / "peers"), str(ROOT / "benchmarks"), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
    folders = [str(tmp_path / "1.0"), str(tmp_path / "2.0")]
    asked = {"at": 1, "shape": (1, 2, 8, 4, True), "sequences": 2, "length": 32}
    made = worker.Worker.first(folders, "flash-linear-attention", **asked)
    assert made is not None
    with made:
        assert made.triton == "2.0"
        assert made.elapsed() > 0
    assert f"does not run with {folders[0]}: RuntimeError: ['wrong with 1.0']" in capsys.readouterr().out
    assert worker.Worker.first(folders[:1], "flash-linear-attention", **asked) is None


@pytest.mark.slow
def test_recurrences_are_measured_on_a_cpu():
    command = [sys.executable, ROOT / "benchmarks" / "gpu_recurrent.py", "--tiny"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=800)
    for name in ("toy-delta", "toy-mamba"):
        assert f"forward and backward, {name}, 2 x 32 tokens" in done.stdout
        assert f"decode, {name}, 2 sequences" in done.stdout
        assert f"forward in chunks, {name}, 2 x 40 tokens" in done.stdout
        (line,) = [line for line in done.stdout.splitlines() if f"numbers, {name}, 2 x 40 tokens" in line]
        assert line.startswith("differ from token by token, of ")
        assert line.split("2 x 40 tokens")[1].split() == ["0", "numbers"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "words"), [("tiny", "toy"), ("tiny-qwen3.5-moe", "toy Qwen3.5-MoE"), ("tiny-nemotron", "toy Nemotron")]
)
def test_an_engine_is_measured_and_scored_in_processes_of_its_own(shape, words):
    command = [sys.executable, ROOT / "benchmarks" / "gpu_engine.py", "--tiny", shape]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=800)
    assert "round 2:" in done.stderr
    assert "k3 0, 0 of 256 logprobs differ" in done.stderr
    assert f"engine, {words} bf16, 1 x (128 in, 256 out), logprobs" in done.stdout


def test_a_study_warms_each_model_once_and_runs_every_arm(module, tmp_path, monkeypatch):
    study = module("gpu_study")
    begun = tmp_path / "begun"
    script = (
        "import sys; open(sys.argv[1], 'a').write(' '.join(sys.argv[2:]) + chr(10)); sys.exit('fp8' in sys.argv[2])"
    )
    monkeypatch.setattr(
        study.Run, "command", lambda run, folder: [sys.executable, "-c", script, str(begun), run.arm, str(run.seed)]
    )
    runs = study.runs_of(["dense"], ["2e-4"], 2, ["zero_kld", "fp4", "fp8_all", "fp8_tensor,seed=1"])
    made = study.Study(tmp_path, runs)
    made.work("0", 1)
    lines = begun.read_text().splitlines()
    assert lines[0] == "zero_kld 0 --dry-run"
    assert lines[1:] == [
        *(f"{arm} {seed}" for arm in ("zero_kld", "fp8_all") for seed in range(2)),
        *("fp8_tensor 1", "fp4 0", "fp4 1"),
    ]
    assert made.done == 4
    assert [line.split(":")[0] for line in made.failed] == [
        str(tmp_path / f"dense-2e-4/{run}.log") for run in ("fp8_all,seed=0", "fp8_all,seed=1", "fp8_tensor,seed=1")
    ]


def test_the_studys_arms_are_configurations(module):
    study = module("gpu_study")

    def config(run):
        words = run.command(Path("runs"))
        return build(compose_recipe(words[words.index("--config-name") + 1], words[words.index("--config-name") + 2 :]))

    def departs(run) -> bool:
        rollout = config(run).rollout
        return bool(rollout.drift.declared) or any(value is not None for value in vars(rollout.profile).values())

    for run in study.runs_of(list(study.RECIPES), ["2e-4"], 1, None):
        assert departs(run) == (run.arm not in ("zero_kld", "other_batches"))
    alone = study.runs_of(["dense"], ["1e-5"], 1, list(study.NAMED), steps=1000)
    assert [run.arm for run in alone] == list(study.NAMED)
    assert all(map(departs, alone))
    assert {run.name.split("/")[0] for run in alone} == {"dense-1e-5-1000"}
    made = config(alone[0])
    assert (made.trainer.num_steps, made.trainer.lr) == (1000, 1e-5)
    assert not set(study.NAMED) & {run.arm for run in study.runs_of(["dense"], ["2e-4"], 1, None)}


def test_the_studys_commands_can_be_pasted(module, monkeypatch, capsys):
    study = module("gpu_study")
    monkeypatch.setattr(sys, "argv", ["benchmarks/gpu_study.py", "--models", "dense", "--seeds", "1", "--list"])
    study.main()
    listed = [shlex.split(line) for line in capsys.readouterr().out.splitlines()]
    assert listed == [run.command(Path("runs/gpu_study")) for run in study.runs_of(["dense"], ["2e-4"], 1, None)]


def test_a_child_that_ends_is_left_out_and_says_why(module, tmp_path, capfd):
    children = module("children")
    path = f"import sys; sys.path.insert(0, {str(ROOT / 'benchmarks')!r}); from children import answer;"
    good = [sys.executable, "-c", f"{path} answer(lambda line: int(line.split()[1]))"]
    bad = [sys.executable, "-c", f"{path} print('on stdout'); answer(lambda line: 1 / (2 - int(line.split()[1])))"]
    known, gone = [], []

    def sides() -> list:
        return [children.Child("good", good), children.Child("bad", bad, log=tmp_path / "log")]

    found = children.in_turns(sides(), ["a", "b"], 2, lambda *of: known.append(of), lambda *of: gone.append(of))
    assert found == {"a": {"good": [1, 2]}, "b": {"good": [1, 2]}}
    assert known == list(found.items())
    ((child, error),) = gone
    assert child.name == "bad"
    assert error.errors == ["ZeroDivisionError: division by zero"]
    assert "on stdout" in str(error)
    assert "ZeroDivisionError" in capfd.readouterr().err
    assert {"on stdout", "ZeroDivisionError: division by zero"} <= {*(tmp_path / "log").read_text().splitlines()}
    with pytest.raises(children.Ended, match="bad ended with code 1"):
        children.in_turns(sides(), ["a"], 2)


def test_sides_that_take_turns_begin_a_work_only_while_there_is_time(module, capsys):
    children, cells = module("children"), module("cells")
    path = f"import sys; sys.path.insert(0, {str(ROOT / 'benchmarks')!r}); from children import answer;"
    side = children.Child("side", [sys.executable, "-c", f"{path} answer(lambda line: 1)"])
    begun = cells.within({name: [name] for name in "abc"}, 10.0, clock=iter((0.0, 0.0, 4.0, 9.0)).__next__)
    assert list(children.in_turns([side], begun, 1)) == ["a", "b"]
    assert capsys.readouterr().err == "no time for the rest; go on with --cells c\n"


def test_an_interrupted_work_keeps_the_rounds_that_ended(module, tmp_path):
    children = module("children")
    path = f"import os, signal, sys; sys.path.insert(0, {str(ROOT / 'benchmarks')!r}); from children import *;"
    path += f"when_prepared(Path({str(tmp_path)!r}));"
    steady = f"{path} answer(lambda line: line)"
    known = []

    def in_turns(ending: str, ahead: bool) -> None:
        ends = f"{path} answer(lambda line: os.kill(os.getppid(), signal.SIGTERM) if line == {ending!r} else line)"
        sides = [children.Child(*each) for each in (("steady", [sys.executable, "-c", steady]),
                                                    ("ends", [sys.executable, "-c", ends]))]  # fmt: skip
        children.prepare(sides, tmp_path, lambda: None)
        children.in_turns(sides, ["a", "b"], 3, lambda *of: known.append(of), ahead=ahead)

    def rounds(work: str, *which: int) -> tuple[str, dict[str, list[str]]]:
        return work, {name: [f"{work} {index}" for index in which] for name in ("steady", "ends")}

    for ending, made in (("b 3", [rounds("a", 1, 2, 3), rounds("b", 1, 2)]), ("b 2", [rounds("a", 1, 2, 3)])):
        for ahead in (False, True):
            with pytest.raises(KeyboardInterrupt):
                in_turns(ending, ahead)
            assert known == made
            known.clear()
    in_turns("", True)
    assert known == [rounds("a", 1, 2, 3), rounds("b", 1, 2, 3)]


def test_an_engine_that_ended_is_tried_in_other_ways(module, tmp_path, monkeypatch):
    engine, setups, tried = module("gpu_engine"), module("engine_sides"), []
    assert setups.setups_of("8B", "") == ["", setups.CAREFUL]
    assert setups.setups_of("qwen3.5-moe", "") == list(setups.SETUPS)
    assert setups.setups_of("qwen3.5-moe", setups.TRITON) == [setups.TRITON, setups.CAREFUL]

    class Child:
        def __init__(self, name, command, environment, log) -> None:
            self.name, self.setup = name, json.loads(command[-2])["setup"]

    def in_turns(sides, works, rounds, known, ended):
        tried.append([(each.name, each.setup, *works) for each in sides])
        for each in [each for each in sides if each.name != "rlloop" and each.setup != setups.CAREFUL]:
            ended(each, engine.Ended(each.name, 1, ["an Error"]))
        for work in works:
            known(work, {each.name: [2.0] for each in sides if each.name == "rlloop" or each.setup == setups.CAREFUL})

    monkeypatch.setattr(engine, "Child", Child)
    monkeypatch.setattr(engine, "in_turns", in_turns)
    names, recorded = ["rlloop", "vLLM default"], []

    def known(work, found, ways) -> None:
        recorded.append(engine.speed_figures("qwen3.5-moe", work, found[work], ways, False))

    settings = {"shape": "qwen3.5-moe", "works": ["one"], "setup": ""}
    engine.speeds(tmp_path, settings, names, 1, True, {}, known, None)
    assert tried == [
        [("rlloop", "", "one"), ("vLLM default", "", "one")],
        [("vLLM default", setups.TRITON, "one")],
        [("vLLM default", setups.CAREFUL, "one")],
    ]
    ((first,), (last,)) = recorded
    assert (first.value, first.peer) == (2.0, None)  # known although the peer ended
    assert (last.name, last.ratio, last.aim) == (first.name, 1.0, 1.0)
    assert last.peer == f"vLLM default, unseeded, {setups.CAREFUL}"
    (figure,) = engine.speed_figures("8B", "one", {"rlloop": [2.0]}, {("one", "vLLM default"): None}, False)
    assert (figure.peer, figure.peer_value) == ("vLLM default: it ended", None)


def test_sglang_is_tried_in_its_own_ways_and_named_so(module, tmp_path, monkeypatch):
    engine, sglang, tried = module("gpu_engine"), module("engine_sglang"), []
    careful = module("engine_sides").CAREFUL

    class Child:
        def __init__(self, name, command, environment, log) -> None:
            self.name, self.setup = name, json.loads(command[-2])["setup"]

    def in_turns(sides, works, rounds, known, ended):
        tried.append([(each.name, each.setup) for each in sides])
        for each in [each for each in sides if each.name == "SGLang" and each.setup != sglang.TRITON]:
            ended(each, engine.Ended(each.name, 1, ["an Error"]))
        known("one", {each.name: [2.0] for each in sides if each.name != "SGLang" or each.setup == sglang.TRITON})

    monkeypatch.setattr(engine, "Child", Child)
    monkeypatch.setattr(engine, "in_turns", in_turns)
    settings = {"shape": "8B", "works": ["one"], "setup": careful}  # vLLM's, which is not SGLang's
    found, setups = engine.speeds(
        tmp_path, settings, ["rlloop", "vLLM default", "SGLang"], 1, True, {}, lambda *_: None, None
    )
    assert tried == [
        [("rlloop", ""), ("vLLM default", careful), ("SGLang", "")],
        [("SGLang", sglang.NO_PROMPTS)],
        [("SGLang", sglang.TRITON)],
    ]
    figures = engine.speed_figures("8B", "one", found["one"], setups, True)  # SGLang's requests have no seeds
    assert [each.peer for each in figures] == [
        f"vLLM default, seeded, {careful}", f"SGLang, unseeded, {sglang.TRITON}",
    ]  # fmt: skip


def test_sglang_has_packages_of_its_own_and_the_room_of_the_others(module, tmp_path, monkeypatch):
    sglang, site = module("engine_sglang"), tmp_path / "site"
    with pytest.raises(SystemExit, match=r"site has no SGLang: pip install --target .*site sglang"):
        sglang.check(site)
    (site / "sglang-0.5.16.dist-info").mkdir(parents=True)
    (site / "sglang-0.5.16.dist-info" / "METADATA").write_text("Name: sglang\nVersion: 0.5.16\n")
    sglang.check(site)
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    made = sglang.environment(site)
    assert made["PYTHONPATH"] == str(site)
    assert made["SGLANG_IS_FLASHINFER_AVAILABLE"] == "false"
    assert "TVM_FFI_CACHE_DIR" not in made
    (site / "jitcache").mkdir()
    (site / "flashinfer_python-0.6.14.dist-info").mkdir()
    (site / "flashinfer_python-0.6.14.dist-info" / "METADATA").write_text("Name: flashinfer-python\nVersion: 0.6.14\n")
    made = sglang.environment(site)
    assert made["TVM_FFI_CACHE_DIR"] == str(site / "jitcache")
    assert "SGLANG_IS_FLASHINFER_AVAILABLE" not in made

    settings = {"running": 512, "cache": 1 << 30, "token": 1 << 17, "setup": ""}
    made = sglang.arguments(tmp_path, settings)
    assert (made["max_total_tokens"], made["max_running_requests"], made["load_format"]) == (8192, 512, "dummy")
    assert (made["attention_backend"], made["cuda_graph_max_bs_decode"]) == ("fa3", 512)
    (tmp_path / "model.safetensors").touch()
    made = sglang.arguments(tmp_path, settings | {"running": 1, "setup": sglang.TRITON})
    assert (made["load_format"], made["cuda_graph_max_bs_decode"]) == ("auto", 256)  # as it comes: of 256 requests
    assert (made["attention_backend"], made["disable_prefill_cuda_graph"]) == ("triton", True)


def test_random_packed_experts_are_those_that_a_checkpoint_would_have(module):
    packed, shapes = module("gpu_packed"), module("gpu_shapes")
    config = packed.work_of(True)[0]
    model, plain = (shapes.random_model(config, "cpu", own) for own in (packed.packed, None))
    experts = model.get_parameter("model.layers.0.mlp.experts.gate_up_proj")
    assert experts.shape == plain.get_parameter("model.layers.0.mlp.experts.gate_up_proj").shape
    assert not experts.requires_grad
    weights = experts.dequantised()
    assert weights.isfinite().all()
    assert weights.std().item() == pytest.approx(0.023, rel=0.1)
    assert model.get_parameter("model.embed_tokens.weight").requires_grad


def test_offloaded_and_plain_steps_are_recorded_one_by_one(module):
    offload = module("offload")
    none = offload.Run("a GPU", "d", 2.0, 0.5, 60 * offload.GIB, 0.0, 1e9)
    moments = none._replace(step=3.0, update=1.5, peak=30 * offload.GIB, moved=2e9)
    alone = offload.figures_of("4b, 64 tokens", "none", none, None, "none")
    assert [(each.name, each.value, each.peer) for each in alone] == [
        ("step, 4b, 64 tokens, none", 2.0, None), ("peak memory, 4b, 64 tokens, none", 60.0, None),
    ]  # fmt: skip
    step, peak, update = offload.figures_of("4b, 64 tokens", "moments", moments, none, "none")
    assert (step.ratio, peak.ratio, update.value, update.ratio) == (2 / 3, 2.0, 1.0, 2.0)
    step, peak = offload.figures_of("4b, 64 tokens", "moments", moments, None, "none: out of memory")
    assert (step.peer, step.ratio, peak.ratio) == ("none: out of memory", None, None)
