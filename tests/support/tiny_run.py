"""A real run that takes seconds: countdown with a tiny random model and a reward that has signal from step one."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from rlloop.metrics import is_timing
from rlloop.models import new_model, save_model
from rlloop.parity.certificate import comparison_of
from rlloop.runs.folder import read_records, read_rollouts, rollout_files
from tests.support.command import Command

LEARNABLE = "def reward(prompt, completion, example):\n    return len(completion) % 7\n"  # as learnable.py
HELD = r"""import time
from pathlib import Path

def reward(prompt, completion, example):
    while held():
        time.sleep(0.01)
    return len(completion) % 7

def held():
    # While there is a file `hold`; where it names a run and a number, once that has exactly so many records of steps.
    try:
        run, records = Path("hold").read_text().split() or ("", "0")
    except FileNotFoundError:
        return False
    file = Path(run, "metrics.jsonl")
    return (file.read_bytes().count(b"\n") if file.exists() else 0) == int(records)
"""


@contextmanager
def held(folder: Path, records: int) -> Iterator[None]:
    """Within, the run in `folder` waits between sampling and learning once it has exactly so many records of steps,
    that of step 0 among them. Steps are so short that a busy machine may have taken all before a test looks again."""
    make_model_once(folder.parent)
    (folder.parent / "learnable.py").write_text(HELD)
    (folder.parent / "hold").write_text(f"{folder.name} {records}")
    yield
    (folder.parent / "hold").unlink()


def steps(folder: Path) -> int:
    """Records of steps so far, that of step 0 among them."""
    metrics = folder / "metrics.jsonl"
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


def history(folder: Path) -> list[object]:
    metrics = [
        {name: value for name, value in record.items() if not is_timing(name)}
        for record in read_records(folder / "metrics.jsonl")
    ]
    return [
        metrics,
        [comparison_of(line) for line in read_records(folder / "parity.jsonl")],
        [read_rollouts(file) for file in rollout_files(folder)],
    ]


def train(folder: Path, *overrides: str, env: Mapping[str, str] | None = None) -> Command:
    """Six steps, a checkpoint after every second; model and reward are made beside the run's folder."""
    return Command(*command_of(folder, *overrides), cwd=folder.parent, env=env)


def command_of(folder: Path, *overrides: str) -> list[str]:
    """What `train` has behind `rlloop`."""
    make_model_once(folder.parent)
    command = ["train", "--config-name", "countdown", f"run.dir={folder}"]
    command += ["model.path=model", "trainer.num_steps=6", "checkpoint.every=2", "eval.num_draws=8", "eval.every=3"]
    command += ["rollout.num_prompts=4", "rollout.group_size=4", "trainer.lr=1e-2", "trainer.num_minibatches=2"]
    return [*command, "reward._target_=learnable.reward", *overrides]


def make_model_once(place: Path) -> None:
    if not (place / "model").exists():
        make_model(place)


def make_model(place: Path, **own: object) -> None:
    """`own`: what its configuration has besides, or instead."""
    model = new_model(
        {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "vocab_size": 160,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": 64,
            "tie_word_embeddings": True,
            "eos_token_id": 1,
            **own,
        },
        seed=0,
    )
    save_model(model, place / "model")
    (place / "learnable.py").write_text(LEARNABLE)
