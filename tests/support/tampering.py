"""A small finished run, and what it takes to tamper with a copy: edits, and a forger who makes all of it agree."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import zstandard
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from rlloop.algorithms import advantages_for
from rlloop.audit import Extent, verify
from rlloop.audit.completions import as_sample
from rlloop.audit.history import History, Row
from rlloop.cli.main import main
from rlloop.loop.step_data import reward_metrics, rollout_metrics
from rlloop.parity.certificate import GENESIS, bits_digest, content_digest
from rlloop.parity.monitor import compare
from rlloop.runs.folder import as_json_file, read_records, read_rollouts, summarize
from rlloop.trainer.checkpoint import MANIFEST, manifest_digest, manifest_of
from rlloop.types import Example
from tests.support.tiny_run import make_model

STEPS, KEPT = 6, (4, 6)  # checkpoints at 2, 4 and 6, of which the last two are kept
Tamper = Callable[[Path], None]


def reward(prompt: str, completion: str, example: Example) -> float:
    """Has signal from the first step on."""
    return len(completion) % 7


def make_run(place: Path, *overrides: str) -> Path:
    """With a key and a witness beside it. Takes a few seconds; the same place again goes on with the run."""
    if not (place / "model").exists():
        prepare(place)
    settings = {
        "run.dir": place / "run", "model.path": place / "model", "trainer.num_steps": STEPS, "checkpoint.every": 2,
        "eval.num_draws": 8, "eval.every": 3, "rollout.num_prompts": 4, "rollout.group_size": 4, "trainer.lr": 1e-2,
        "reward._target_": "tests.support.tampering.reward", "certificate.key": place / "key.pem",
        "certificate.witness": place / "witness.jsonl",
    }  # fmt: skip
    given = [*(f"{key}={value}" for key, value in settings.items()), *overrides]
    assert main(["train", "--config-name", "countdown", *given]) == 0
    return place / "run"


def prepare(place: Path) -> None:
    make_model(place)
    key = Ed25519PrivateKey.generate()
    (place / "key.pem").write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    public = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    (place / "key.pub").write_bytes(public)


def problems_of(run: Path, **extent: Any) -> list[str]:
    full = Extent(**{"rescored": None, "rewarded": None, "run_code": True, **extent})
    return [f"{check.name}: {problem}" for check in verify(run, full) for problem in check.problems]


# ------------------------------------------------------------------------------------------------ edits


def rollouts(run: Path, step: int) -> Path:
    return run / "rollouts" / f"step_{step:08d}.jsonl.zst"


def put(run: Path, step: int, rows: list[dict[str, Any]]) -> None:
    rollouts(run, step).write_bytes(zstandard.compress(b"\n".join(map(msgspec.json.encode, rows)) + b"\n", 1))


def rows(change: Callable[[list[dict[str, Any]]], Any], step: int = 5) -> Tamper:
    """Completions of a step, by default of one whose weights are kept; `change` alters the list or returns another."""

    def tamper(run: Path) -> None:
        found = read_rollouts(rollouts(run, step))
        put(run, step, change(found) or found)

    return tamper


def row(change: Callable[[dict[str, Any]], Any], step: int = 5, place: int = 3) -> Tamper:
    return rows(lambda found: change(found[place]), step)


def lines(name: str, change: Callable[[list[bytes]], list[bytes]]) -> Tamper:
    def tamper(run: Path) -> None:
        file = run / name
        file.write_bytes(b"".join(change(file.read_bytes().splitlines(keepends=True))))

    return tamper


def record(step: int, name: str = "metrics.jsonl", **fields: Any) -> Tamper:
    """Fields of one line; a function makes a new value of the old one."""

    def change(found: list[bytes]) -> list[bytes]:
        objects = [json.loads(line) for line in found]
        for each in objects:
            if each["step"] == step:
                each |= {key: value(each[key]) if callable(value) else value for key, value in fields.items()}
        return [msgspec.json.encode(each) + b"\n" for each in objects]

    return lines(name, change)


def text(name: str, old: str, new: str) -> Tamper:
    def tamper(run: Path) -> None:
        content = (run / name).read_text()
        assert old in content
        (run / name).write_text(content.replace(old, new))

    return tamper


def remove(name: str) -> Tamper:
    def tamper(run: Path) -> None:
        shutil.rmtree(run / name) if (run / name).is_dir() else (run / name).unlink()

    return tamper


def flip(name: str, at: int = -5) -> Tamper:
    def tamper(run: Path) -> None:
        content = bytearray((run / name).read_bytes())
        content[at] ^= 1
        (run / name).write_bytes(content)

    return tamper


def both(*tampers: Tamper) -> Tamper:
    def tamper(run: Path) -> None:
        for each in tampers:
            each(run)

    return tamper


def reseal(run: Path) -> None:
    """Manifests that agree with the files beside them."""
    for folder in (run / "checkpoints").glob("step_*"):
        (folder / MANIFEST).write_text(manifest_of(folder, int(folder.name[5:])))


def agree(run: Path) -> None:
    """Advantages by the stored rewards, and the metrics that completions give: what a diligent forger does first."""
    config = History(run).built
    assert not isinstance(config, str)
    estimate = advantages_for(config.algorithm, config.rollout.max_tokens, config.rollout.group_size)
    for step in range(1, STEPS + 1):
        found = read_rollouts(rollouts(run, step))
        rewards, groups = ([each[key] for each in found] for key in ("reward", "group"))
        advantages, _ = estimate(rewards, groups, [len(each["token_ids"]) for each in found])
        put(run, step, [{**each, "advantage": value} for each, value in zip(found, advantages, strict=True)])
        samples = [as_sample(msgspec.convert(each, Row)) for each in read_rollouts(rollouts(run, step))]
        same = [sample.completion.logprobs for sample in samples]
        metrics = {**rollout_metrics(samples, step - 1), **reward_metrics(samples), **compare(samples, same).metrics}
        record(step, **metrics)(run)


def forge(run: Path) -> None:
    """Write certificate, ledger's file digests, checkpoints' heads, manifests and summary anew, so that all agree."""
    found = list(read_records(run / "parity.jsonl"))
    metrics = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    by_step = {json.loads(line)["step"]: line for line in metrics}
    config = hashlib.sha256((run / "config.yaml").read_bytes()).hexdigest()
    previous, written = GENESIS, b""
    for line in found:
        step = line["step"]
        trained = [each for each in read_rollouts(rollouts(run, step)) if each["outcome"] == "trained"]
        scored = {
            "engine": [each["logprobs"] for each in trained],
            "trainer": [each.get("trainer_logprobs", each["logprobs"]) for each in trained],
        }
        line |= {side: bits_digest([np.array(each, np.float32) for each in arrays]) for side, arrays in scored.items()}
        raw = bits_digest([np.array(each.get("raw_logprobs", each["logprobs"]), np.float32) for each in trained])
        line["raw"] = {"engine": raw, "trainer": raw}
        line["tokens"] = sum(len(each["logprobs"]) for each in trained)
        if "rollouts" in line:
            line["rollouts"] = hashlib.sha256(rollouts(run, step).read_bytes()).hexdigest()
            line["metrics"] = hashlib.sha256((by_step[0] if step == 1 else b"") + by_step[step]).hexdigest()
        if "config" in line:
            line["config"] = config
        for saved in line.get("checkpoints", {}):
            line["checkpoints"][saved] = (
                manifest_digest(run / "checkpoints" / f"step_{saved}") or line["checkpoints"][saved]
            )
        del line["hash"]
        line["previous"] = previous
        line["hash"] = previous = content_digest(line)
        written += msgspec.json.encode(line) + b"\n"
        if (state := run / "checkpoints" / f"step_{step}" / "loop.json").exists():
            state.write_text(json.dumps({**json.loads(state.read_text()), "certificate": previous}) + "\n")
            reseal(run)
    (run / "parity.jsonl").write_bytes(written)
    if (run / "summary.json").exists():
        status = json.loads((run / "summary.json").read_text())["status"]
        (run / "summary.json").write_bytes(as_json_file(summarize([json.loads(line) for line in metrics], status)))
