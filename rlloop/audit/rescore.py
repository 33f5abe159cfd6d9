"""A check of a run that computes: stored rollouts scored again under the stored weights that sampled them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlloop.records import read_config, read_rollouts, rollout_files, step_of
from rlloop.types import SamplingParams


def rescore(run: Path, most: int) -> tuple[str, list[str]]:
    """What was done, and every completion whose bits are others. For runs whose `parity.mode` is `require`.

    `most` completions of those whose weights are in a checkpoint, chosen by a hash of their names: the same ones at
    each call, and nobody could have known which while the run was written.
    """
    from rlloop.models import ScoreRow, load_model, score
    from rlloop.numerics.profile import NumericsProfile

    config = read_config(run) or {}
    mode = config.get("parity", {}).get("mode")
    if mode != "require":
        return f"not done: parity.mode={mode} does not promise equal bits", []
    checkpoints = {int(path.name[5:]): path for path in (run / "checkpoints").glob("step_*")}
    rows = [row for file in rollout_files(run) for row in _sampled_by(file, checkpoints.keys())]
    rows = sorted(rows, key=lambda row: hashlib.sha256(row["uid"].encode()).digest())[:most]
    problems: list[str] = []
    tokens = 0
    for step in sorted({row["policy_version"] for row in rows}):
        profile = NumericsProfile(**config["model"]["profile"])
        model = load_model(checkpoints[step], dtype=config["model"]["dtype"], profile=profile)
        for row in (row for row in rows if row["policy_version"] == step):
            sampling = SamplingParams(**{"max_tokens": len(row["token_ids"]), **row["sampling"]})
            written = [at for start, end in row.get("turns", [[0, len(row["token_ids"])]]) for at in range(start, end)]
            ids = [*row["prompt_ids"], *row["token_ids"]]
            places = [len(row["prompt_ids"]) + at for at in written]
            tokens += len(places)
            for name, params in (("logprobs", sampling), ("raw_logprobs", None)):
                stored = np.array(row.get(name, row["logprobs"]), np.float32)
                found = score(model, [ScoreRow(ids, places, params)])[0].detach().cpu().numpy()
                if differ := int((stored.view(np.int32) != found.view(np.int32)).sum()):
                    problems.append(f"{row['uid']}: {differ} of {len(stored)} {name} are not the bits of step_{step}")
    where = ", ".join(f"step_{step}" for step in sorted({row["policy_version"] for row in rows}))
    found = f"{len(rows)} completions, {tokens} tokens, under {where}" if rows else "no sampling weights are stored"
    return found, problems


def _sampled_by(file: Path, steps: Any) -> Sequence[Mapping[str, Any]]:
    """A file's completions whose weights are those of one of the steps. Skips files that cannot have any."""
    if steps and step_of(file) <= min(steps):
        return []
    return [row for row in read_rollouts(file) if row["policy_version"] in steps]
