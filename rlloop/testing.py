"""Fakes of the loop's parts, for tests without a model; and planted faults, for tests with one.

    policy = FakePolicy(vocabulary=8)
    parts = fake_parts(policy)                # an engine, a trainer, a task and a reward that work together
    engine = FakeEngine(policy, drift=1e-6)   # one whose numerics differ from the trainer's

The fakes really learn, by REINFORCE on one vector of logits, so that a loop's reward rises.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlloop.cache import cache_root
from rlloop.inputs import as_model_input
from rlloop.loop.parts import Parts
from rlloop.metrics import Mean, Reduction
from rlloop.parity.asked import Vocabulary
from rlloop.types import Completion, Example, ModelInput, Recomputed, RewardResult, Sample, SamplingParams

if TYPE_CHECKING:
    from rlloop.numerics.ops import Ops
    from rlloop.numerics.profile import NumericsProfile
    from rlloop.rollout import Engine
    from rlloop.rollout.vllm.engine import VllmEngine


def plant_fault(engine: Engine | VllmEngine, op: str) -> None:
    """Replace one operation of a real engine by its stock implementation, without declaring it.

    `op`: a field of `NumericsProfile`. Profile and fingerprint do not change, so only a comparison of bits can find it.
    """
    from rlloop.numerics.ops import ops_for

    def faulty(declared: NumericsProfile) -> Ops:
        return ops_for(dataclasses.replace(declared, **{op: "stock"}))

    engine.model = engine.model.with_profile(engine.model.profile, faulty)


@contextmanager
def planted_fault(op: str) -> Iterator[None]:
    """Within the context, every engine that `rlloop train` builds in this process has `plant_fault(engine, op)`.

    Example: `with planted_fault("linear"): assert rlloop.cli.main.main(["train", ...]) == 3`.
    """
    from rlloop.launch import local as launch

    make_engine = launch.make_engine

    def faulty(*args: Any, **settings: Any) -> Any:
        engine: Any = make_engine(*args, **settings)
        plant_fault(engine, op)
        return engine

    launch.make_engine = faulty
    try:
        yield
    finally:
        launch.make_engine = make_engine


@dataclass
class FakePolicy:
    """One distribution over `vocabulary` tokens, the same at every position; token 0 ends a completion."""

    vocabulary: int = 8
    logits: np.ndarray = field(init=False)  # [V] float64

    def __post_init__(self) -> None:
        self.logits = np.zeros(self.vocabulary)

    def logprobs(self) -> np.ndarray:
        """[V] float32"""
        shifted = self.logits - self.logits.max()
        return (shifted - np.log(np.exp(shifted).sum())).astype(np.float32)

    def draw(self, seed: int, count: int) -> np.ndarray:
        """The first `count` tokens, [count] int64, of a completion sampled with `seed`."""
        uniform = np.random.Generator(np.random.Philox(key=seed)).random(count)
        mass = np.exp(self.logprobs().astype(np.float64)).cumsum()
        return np.searchsorted(mass, uniform).clip(max=self.vocabulary - 1)


class FakeEngine:
    """Samples from a `FakePolicy`. `drift` is added to every logprob, as if its arithmetic were another."""

    def __init__(self, policy: FakePolicy, *, drift: float = 0.0) -> None:
        self.policy = policy
        self.drift = drift
        self.policy_version = 0
        self.generated = 0  # completions made so far

    def set_version(self, version: int) -> None:
        self.policy_version = version

    def generate(
        self, prompts: Sequence[ModelInput | list[int]], sampling: SamplingParams | list[SamplingParams]
    ) -> list[Completion]:
        each = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else sampling
        self.generated += len(prompts)
        ids = [as_model_input(prompt).token_ids for prompt in prompts]
        return [self._complete(prompt, params) for prompt, params in zip(ids, each, strict=True)]

    def _complete(self, prompt: list[int], params: SamplingParams) -> Completion:
        table = self.policy.logprobs()
        drawn = self.policy.draw(params.seed or 0, params.max_tokens).tolist()
        stop = next((i for i, token in enumerate(drawn) if token == 0 and i >= params.min_tokens), None)
        tokens = drawn if stop is None else drawn[: stop + 1]
        logprobs = (table[tokens] + np.float32(self.drift)).astype(np.float32)
        reason = "length" if stop is None else "stop"
        return Completion(prompt, tokens, logprobs, logprobs, self.policy_version, reason, params)

    def fingerprint(self) -> dict[str, Any]:
        return {"fake": True}


@dataclass
class FakeUpdate:
    recomputed: Recomputed
    metrics: dict[str, Reduction]


class FakeTrainer:
    """REINFORCE with momentum on a `FakePolicy`'s logits. The `loss` argument is ignored."""

    def __init__(self, policy: FakePolicy, lr: float = 0.5) -> None:
        self.policy = policy
        self.lr = lr
        self.momentum = np.zeros(policy.vocabulary)
        self.gradient = np.zeros(policy.vocabulary)
        self.anchors: list[Sequence[np.ndarray] | None] = []  # the old_logprobs of each call

    def recompute(self, batch: Sequence[Sample]) -> Recomputed:
        completions, table = [sample.completion for sample in batch], self.policy.logprobs()
        scored = [table[completion.token_ids][list(completion.written)] for completion in completions]
        turns = [each.turns or ((0, len(each.token_ids)),) for each in completions]
        redrawn = [
            np.concatenate([self.policy.draw(each.sampling.seed or 0, end - start) for start, end in spans])
            for each, spans in zip(completions, turns, strict=True)
        ]
        return Recomputed(scored, scored, redrawn)

    def forward_backward(
        self, batch: Sequence[Sample], loss: Callable[..., Any], *, old_logprobs: Sequence[np.ndarray] | None = None
    ) -> FakeUpdate:
        self.anchors.append(old_logprobs)
        recomputed = self.recompute(batch)
        logprobs = recomputed.logprobs
        tokens = sum(map(len, logprobs))
        probabilities = np.exp(self.policy.logprobs().astype(np.float64))
        for sample in batch:
            token_ids = [sample.completion.token_ids[index] for index in sample.completion.written]
            counts = np.bincount(token_ids, minlength=self.policy.vocabulary)
            self.gradient += sample.advantage * (counts - len(token_ids) * probabilities) / tokens
        total = sum(-sample.advantage * float(scored.sum()) for sample, scored in zip(batch, logprobs, strict=True))
        return FakeUpdate(recomputed, {"loss/policy": Mean(total, tokens)})

    def reference_kl(self, batch: Sequence[Sample], kind: str) -> list[float]:
        """k1 against a uniform reference, for every `kind`."""
        level = float(np.log(self.policy.vocabulary))
        return [float((sample.completion.logprobs + level).sum()) for sample in batch]

    def routing(self) -> dict[str, float]:
        return {}

    def replay_experts(self, on: bool) -> None:
        assert not on, "a fake policy has no experts"

    def optim_step(self) -> dict[str, float]:
        norm = float(np.linalg.norm(self.gradient))
        self.momentum = 0.9 * self.momentum + self.gradient
        self.policy.logits = self.policy.logits + self.lr * self.momentum
        self.gradient = np.zeros_like(self.gradient)
        return {"loss/grad_norm": norm}

    def save(self, folder: Path) -> None:
        state = {"logits": self.policy.logits.tolist(), "momentum": self.momentum.tolist()}
        (folder / "fake.json").write_text(json.dumps(state))

    def restore(self, folder: Path) -> None:
        state = json.loads((folder / "fake.json").read_text())
        self.policy.logits, self.momentum = np.array(state["logits"]), np.array(state["momentum"])

    def fingerprint(self) -> dict[str, Any]:
        return {"fake": True}


class FakeSync:
    """Tells engines, which share the trainer's policy, their version."""

    def __init__(self, *engines: FakeEngine) -> None:
        self.engines = engines
        self.published: list[int] = []

    def publish(self, version: int) -> dict[str, float]:
        self.published.append(version)
        for engine in self.engines:
            engine.set_version(version)
        return {}


class FakeTask:
    """Problem i: say token `target` as often as possible."""

    def __init__(self, vocabulary: int = 8, seed: int = 0, model_path: str | None = None) -> None:
        self.vocabulary = vocabulary
        self.seed = seed
        self.model_path = model_path

    def model_folder(self) -> Path:
        """`model_path`; else an empty folder, since a fake policy has no files."""
        folder = cache_root() / "fake-model" if self.model_path is None else Path(self.model_path)
        folder.mkdir(exist_ok=True)
        return folder

    def train_examples(self, step: int, count: int) -> list[Example]:
        return [self._example(f"train-{step}-{i}", i) for i in range(count)]

    def eval_examples(self, count: int) -> list[Example]:
        return [self._example(f"eval-{i}", i) for i in range(count)]

    def _example(self, name: str, index: int) -> Example:
        return Example(id=name, prompt_ids=[1 + index % (self.vocabulary - 1)], prompt=name, data={"target": 3})

    def decode(self, token_ids: list[int]) -> str:
        return " ".join(map(str, token_ids))


def fake_reward(prompt: str, completion: str, example: Example) -> RewardResult:
    """The fraction of tokens that are the target."""
    tokens = completion.split()
    hits = tokens.count(str(example.data["target"]))
    return RewardResult(hits / len(tokens), solved=2 * hits >= len(tokens), components={"tokens": float(len(tokens))})


class FakeScorer:
    """Calls a sync reward, sample after sample. A reward may return a failure (with `kind` and `message`) itself."""

    def __init__(self, reward: Callable[[str, str, Example], Any] = fake_reward) -> None:
        self.reward = reward

    def score(self, requests: Sequence[tuple[str, str, Example]]) -> list[Any]:
        return [self.reward(*request) for request in requests]


@dataclass(frozen=True)
class FakeCheckpoint:
    step: int
    path: Path
    skipped: tuple[str, ...] = ()


class FakeCheckpoints:
    """A checkpoint store of a temporary folder and one rename."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def save(self, step: int, writers: Iterable[Callable[[Path], None]]) -> Path:
        temporary, final = self.root / "tmp", self.root / f"step_{step}"
        for folder in (temporary, final):
            shutil.rmtree(folder, ignore_errors=True)
        temporary.mkdir(parents=True)
        for write in writers:
            write(temporary)
        return temporary.rename(final)

    def latest(self) -> FakeCheckpoint | None:
        steps = self._steps()
        return FakeCheckpoint(steps[-1], self.root / f"step_{steps[-1]}") if steps else None

    def digests(self, step: int) -> dict[str, str]:
        """The checkpoints' names stand in for digests."""
        return {str(each): f"step_{each}" for each in self._steps() if each <= step}

    def _steps(self) -> list[int]:
        return sorted(int(path.name[5:]) for path in self.root.glob("step_*"))


def centred(
    rewards: Sequence[float], groups: Sequence[int], lengths: Sequence[int], kl: Sequence[float] | None = None
) -> tuple[list[float], list[bool]]:
    """Rewards less their mean; every sample is kept."""
    mean = float(np.mean(rewards))
    return [reward - mean for reward in rewards], [True] * len(rewards)


def fake_parts(root: Path, *, policy: FakePolicy | None = None, **replaced: Any) -> Parts:
    """Fakes that share one policy, with checkpoints under `root`. `replaced`: other parts to use instead."""
    policy = policy or FakePolicy()
    engine = replaced.get("engine") or FakeEngine(policy)
    parts: Mapping[str, Any] = {
        "task": FakeTask(policy.vocabulary),
        "engine": engine,
        "trainer": FakeTrainer(policy),
        "sync": FakeSync(engine),
        "scorer": FakeScorer(),
        "advantages": centred,
        "loss": lambda batch: None,
        "checkpoints": FakeCheckpoints(root),
        "vocabulary": Vocabulary(policy.vocabulary, (0,)),
    }
    return Parts(**{**parts, **replaced})
