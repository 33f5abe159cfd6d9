"""The training loop: sync -> rollout -> reward -> advantage -> update -> record.

Step k (from 1) makes version k of the weights; the schedule decides which version samples it, k − 1 by default.
Everything random is a function of (run seed, purpose, step, prompt, index in the group), so a resumed run, another
launch mode or another number of engines repeats it. The loop knows protocols only: neither torch, ray, vllm nor a
concrete engine.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from rlloop.config.run import Anchor, ParityMode, RunConfig
from rlloop.errors import RlloopError, RunError
from rlloop.loop.parts import Parts
from rlloop.loop.recorder import Recorder
from rlloop.loop.sampler import Sampler
from rlloop.loop.schedule import ended
from rlloop.loop.step_data import Untrained, full_batch, minibatches, outcomes_of, reward_metrics, rollout_metrics
from rlloop.metrics import Mean, Reduction, merge, values
from rlloop.parity.monitor import ParityMonitor
from rlloop.parity.token_types import compare_first_prompt
from rlloop.protocols import Observer, Publication
from rlloop.runs.folder import RunFolder
from rlloop.types import Recomputed, RewardResult, Sample, changed


class RewardsFailed(RlloopError):
    """Every sample of a batch was rejected, so there is nothing to learn from."""


class Loop:
    """Trains `parts.trainer` for `trainer.num_steps` steps, recording each in `folder`."""

    def __init__(
        self,
        config: RunConfig,
        parts: Parts,
        folder: RunFolder,
        monitor: ParityMonitor,
        observers: Sequence[Observer] = (),
        machine: Callable[[], Mapping[str, float]] = dict,
        mark: Callable[[str], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        """`machine`: metrics of the machine's use, which every record has. `mark`: entered in each phase of a step."""
        self.config, self.parts, self.folder, self.monitor = config, parts, folder, monitor
        self.sampler = Sampler(config, parts.task, parts.engine, parts.vocabulary, engine_lag=parts.engine_lag)
        self.recorder = Recorder(
            folder, monitor, observers, routing=parts.trainer.routing, doctor=parts.doctor, machine=machine, mark=mark
        )
        self._published: tuple[int, Publication] | None = None  # version and publication

    def run(self, start: int, should_stop: Callable[[], bool] = lambda: False) -> int:
        """Take the steps after `start` (0: a new run). Returns the last step taken, with a checkpoint behind it."""
        last = self.config.trainer.num_steps
        if start == 0:
            self.recorder.record(0, self.evaluate(version=0))
        for step in range(start + 1, last + 1):
            began = time.perf_counter()
            metrics = self.step(step)
            if step == last or _due(step, self.config.eval.every):
                metrics |= self.evaluate(version=step)
            self.recorder.record(step, {**metrics, "time/step": time.perf_counter() - began})
            stopping = should_stop()
            if step == last or stopping or _due(step, self.config.checkpoint.every):
                self.save(step)
            if stopping:
                return step
        return max(start, last)

    def step(self, step: int) -> dict[str, Any]:
        """One update of the policy; returns its metrics."""
        version, timed, needed = step - 1, self.recorder.timed, self.config.rollout.num_prompts
        accepted, trained = list[Sample](), list[Sample]()
        rejected, dropped = list[Untrained](), list[Untrained]()
        metrics = dict[str, Any]()
        self.publish(version)
        for first in range(0, self.config.max_prompts, needed):  # again only under dynamic sampling
            with timed("rollout"):
                samples = self.parts.schedule.samples(self.sampler, step, version, first)
            self.stop_at_faults(step, version, samples)
            with timed("reward"):
                scored, failed = self.score(samples)
            accepted, rejected = accepted + scored, rejected + failed
            with timed("advantage"):
                trained, dropped, divergence = self.select(accepted)
            metrics |= divergence
            if len({sample.group for sample in trained}) >= needed:
                break
        with timed("parity"):
            metrics |= self._prompt_parity(step, version, trained, rejected + dropped)
        with timed("update"):
            metrics |= self.update(step, version, trained, rejected + dropped)
        sampled = accepted + [sample for sample, _ in rejected]
        return {
            **self.published(),
            **metrics,
            **rollout_metrics(sampled, version),
            **reward_metrics(accepted),
            **self.recorder.speed(sampled, trained),
            **self.parts.measured(),
            "ledger/sampled": len(sampled),
            "ledger/accepted": len(accepted),
            "ledger/rejected": len(rejected),
            "ledger/dropped": len(dropped),
            "ledger/trained": len(trained),
        }

    def _prompt_parity(
        self, step: int, version: int, trained: Sequence[Sample], untrained: Sequence[Untrained]
    ) -> dict[str, float]:
        """`parity/k3_text` and `parity/k3_image` of one prompt with images. Raises `ParityError` where it differs under
        `require`, before the weights move."""
        comparison = compare_first_prompt(self.parts.engine, self.parts.trainer, trained)
        if comparison is None:
            return {}
        if comparison.difference is not None and self.config.parity.mode is ParityMode.require:
            rest = [*((sample, "rejected: its step is not trained") for sample in trained), *untrained]
            self.recorder.compare(step, version, [], Recomputed([]), rest, comparison)
        return comparison.metrics

    def publish(self, version: int) -> None:
        """Begin to bring the engines to `version`, once."""
        if self._published is None or self._published[0] != version:
            with self.recorder.timed("sync"):
                self._published = version, self.parts.schedule.publish(self.parts.sync, version)

    def published(self) -> Mapping[str, Any]:
        """Metrics of the last publication, once it has ended; they belong to the step that it samples, even if an
        evaluation comes first."""
        assert self._published is not None
        with self.recorder.timed("sync"):
            return ended(self._published[1])

    def stop_at_faults(self, step: int, version: int, samples: Sequence[Sample]) -> None:
        """Raises `ParityError` for completions that do not match their request; `observe` rejects and counts them."""
        if self.config.parity.mode is not ParityMode.observe and any(sample.fault for sample in samples):
            rest = [(sample, f"rejected: {sample.fault or 'nothing of this step is trained'}") for sample in samples]
            self.recorder.compare(step, version, [], Recomputed([]), rest)

    def score(self, samples: Sequence[Sample]) -> tuple[list[Sample], list[Untrained]]:
        """Score every sample. One whose reward failed is rejected with the reason, never scored 0.

        Raises `RewardsFailed` where all are rejected.
        """
        accepted: list[Sample] = []
        rejected: list[Untrained] = []
        for sample, outcome in zip(samples, outcomes_of(self.parts.scorer, samples), strict=True):
            if isinstance(outcome, RewardResult):
                accepted.append(changed(sample, result=outcome))
            else:
                rejected.append((sample, f"rejected: {outcome}"))
        if rejected:
            sample, why = rejected[0][0], rejected[0][1].removeprefix("rejected: ")
            self.folder.log(f"{len(rejected)} of {len(samples)} samples rejected, first {sample.uid}: {why}")
            if not accepted:
                raise RewardsFailed(f"every one of {len(samples)} samples was rejected, first: {why}")
        return accepted, rejected

    def select(self, accepted: Sequence[Sample]) -> tuple[list[Sample], list[Untrained], dict[str, float]]:
        """Advantages over all accepted samples. Returns those to train, the others with the reason, and metrics."""
        algorithm = self.config.algorithm
        kl = self.parts.trainer.reference_kl(accepted, algorithm.reward_kl) if algorithm.reward_kl_coef else None
        advantages, keep = self.parts.advantages(
            [sample.result.reward for sample in accepted],
            [sample.group for sample in accepted],
            [sample.completion.longest_turn for sample in accepted],
            kl,
        )
        weighted = [
            changed(sample, advantage=float(advantage)) for sample, advantage in zip(accepted, advantages, strict=True)
        ]
        if self.parts.critic is not None:
            weighted = self.parts.critic.advantages(weighted)
        trained, dropped = full_batch(weighted, keep, self.config.rollout.num_prompts)
        return trained, dropped, {} if kl is None else {"reward/kl_ref": float(np.mean(kl))}

    def update(
        self, step: int, version: int, trained: Sequence[Sample], untrained: Sequence[Untrained]
    ) -> dict[str, Any]:
        """Compare every trained token, record, and only then move the weights.

        One minibatch: the comparison is with the logprobs that the loss itself is computed from. Several: with a
        separate forward before the first of them, which then anchors their ratios. Samples of past weights: with the
        trainer's logprobs under those.
        """
        if not trained:
            return self.recorder.compare(step, version, [], Recomputed([]), untrained)
        trainer, count = self.parts.trainer, self.config.trainer.num_minibatches
        trainer.replay_experts(self.monitor.replays)
        metrics: dict[str, Any] | None = None
        past, present = self.parts.schedule.recompute(trained), None
        if past is not None:
            versions = Counter(int(each) for sample in trained for each in sample.completion.token_versions)
            if versions.keys() != {past[0]}:  # tokens by version
                self.monitor.certificate.note(
                    versions={str(version): versions[version] for version in sorted(versions)}
                )
            metrics = self.recorder.compare(step, past[0], trained, past[1], untrained)
        elif count > 1:
            present = trainer.recompute(trained)
            metrics = self.recorder.compare(step, version, trained, present, untrained)
        anchors = self._anchors(trained, present)
        merged: dict[str, Reduction] = {}
        for chosen in minibatches(trained, count):
            batch = [trained[i] for i in chosen]
            old = None if anchors is None else [anchors[i] for i in chosen]
            result = trainer.forward_backward(batch, self.parts.loss, old_logprobs=old)
            if metrics is None:
                metrics = self.recorder.compare(step, version, trained, result.recomputed, untrained)
            self.published()  # reads the weights
            stepped = {name: Mean(value, 1) for name, value in trainer.optim_step().items()}
            if self.parts.critic is not None:
                stepped |= {name: Mean(value, 1) for name, value in self.parts.critic.update(batch).items()}
            merged = merge([merged, result.metrics, stepped])
        return {**(metrics or {}), **values(merged)}

    def _anchors(self, trained: Sequence[Sample], present: Recomputed | None) -> Sequence[np.ndarray] | None:
        """Logprobs [T] a sample that the policy ratio divides by; None: the update's own, so that it starts at 1."""
        if self.config.algorithm.anchor is Anchor.rollout:
            return [sample.completion.logprobs for sample in trained]
        if self.config.trainer.num_minibatches == 1:
            return None
        return (present or self.parts.trainer.recompute(trained)).logprobs

    def evaluate(self, version: int) -> dict[str, Any]:
        """`eval/*` of held-out problems under the weights of `version`, with the same problems and seeds at every step.

        The completions are compared with the trainer as trained ones are, before they are scored; raises `ParityError`
        likewise. An engine that deliberately differs from the policy is evaluated too, and not compared.
        """
        self.publish(version)
        self.published()
        with self.recorder.timed("eval"):
            samples = self.sampler.held_out(self.parts.eval_engine or self.parts.engine, version)
            compared = self._compare_held_out(version, samples)
            results, failed = self._results(samples)
            metrics = {
                **compared,
                "eval/solved": float(np.mean([result.solved for result in results])),
                "eval/reward": float(np.mean([result.reward for result in results])),
                "eval/draws": len(results),
            }
            if failed:
                metrics["eval/rejected"] = len(failed)
            if self.parts.eval_engine not in (None, self.parts.engine):
                results, _ = self._results(self.sampler.held_out(self.parts.engine, version))
                metrics["eval/engine_solved"] = float(np.mean([result.solved for result in results]))
                metrics["eval/engine_reward"] = float(np.mean([result.reward for result in results]))
        return metrics

    def _compare_held_out(self, version: int, samples: Sequence[Sample]) -> dict[str, float]:
        """The comparison's part of `eval/*`. The trainer still has the weights of `version`, so one forward does."""
        trainer = self.parts.trainer
        whole = [each for each in samples if each.completion.token_ids and not (each.fault or each.broken)]
        trainer.replay_experts(self.monitor.replays)
        recomputed = trainer.recompute(whole) if whole else Recomputed([])
        return self.recorder.compare_held_out(version, whole, recomputed, [each for each in samples if each.fault])

    def _results(self, samples: Sequence[Sample]) -> tuple[list[RewardResult], list[str]]:
        """Results of held-out completions, and why others have none."""
        outcomes = outcomes_of(self.parts.scorer, samples)
        results = [outcome for outcome in outcomes if isinstance(outcome, RewardResult)]
        failed = [outcome for outcome in outcomes if isinstance(outcome, str)]
        if not results:
            raise RewardsFailed(f"every one of {len(failed)} held-out samples was rejected, first: {failed[0]}")
        if failed:
            self.folder.log(f"{len(failed)} of {len(samples)} held-out samples rejected, first: {failed[0]}")
        return results, failed

    def save(self, step: int) -> None:
        """A checkpoint, with the records before it safely on the disk."""
        self.parts.schedule.settle()
        self.folder.metrics.sync()
        self.folder.parity.sync()
        state = {"step": step, "batches": self.sampler.batches, "certificate": self.monitor.certificate.previous}

        def write_state(folder: Path) -> None:
            (folder / "loop.json").write_text(json.dumps(state) + "\n")

        self.parts.checkpoints.save(step, [*(stateful.save for stateful in self._stateful()), write_state])
        self.monitor.certificate.attest(step, self.parts.checkpoints.digests(step))
        self.folder.rotate(step)

    def restore(self) -> int:
        """Load the newest whole checkpoint and set later records aside. Returns its step; 0: start anew.

        Raises `RunError` where the run's certificate is not the one that the checkpoint continues.
        """
        checkpoint = self.parts.checkpoints.latest()
        if checkpoint is None:
            self.folder.rewind(None)
            self.monitor.certificate.reload()
            return 0
        for damage in checkpoint.skipped:
            self.folder.log(f"skipped a damaged checkpoint: {damage}")
        self.folder.rewind(checkpoint.step)
        state = json.loads((checkpoint.path / "loop.json").read_text())
        self.monitor.certificate.reload()
        if self.monitor.certificate.previous != state["certificate"]:
            raise RunError(
                f"{self.folder.parity.path} is not the certificate that {checkpoint.path} continues; restore the file "
                "from a copy, or start a new run in another folder (run.dir)"
            )
        for stateful in self._stateful():
            stateful.restore(checkpoint.path)
        self.sampler.batches = state["batches"]
        self.monitor.certificate.note(checkpoints=self.parts.checkpoints.digests(checkpoint.step))
        return checkpoint.step

    def close(self) -> None:
        """Ends the threads of schedule and environments."""
        self.parts.schedule.close()
        self.sampler.close()

    def _stateful(self) -> list[Any]:
        critic = [] if self.parts.critic is None else [self.parts.critic]
        return [self.parts.trainer, *critic, *self.parts.stateful, self.parts.schedule]


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
