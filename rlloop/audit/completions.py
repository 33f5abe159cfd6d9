"""Checks that go through every completion, step by step: requests, tokens, outcomes, advantages and metrics."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from rlloop.algorithms import advantages_for
from rlloop.audit.history import History, Rollouts, Row
from rlloop.audit.parts import Parts
from rlloop.config.run import RunConfig
from rlloop.loop.step_data import reward_metrics, rollout_metrics, training_sampling
from rlloop.parity.asked import ending_fault, fault_of
from rlloop.parity.certificate import bits_digest
from rlloop.parity.monitor import compare
from rlloop.runs.images import ImageStore
from rlloop.types import Completion, Example, RewardResult, Sample, SamplingParams, stop_ids

CLOSE = {"rel_tol": 1e-9, "abs_tol": 1e-12}  # another machine's libraries may add in another order


class CompletionCheck(Protocol):
    """One check over all completions: called with each step's, then asked for its summary."""

    name: str

    def check(self, step: Rollouts) -> list[str]:
        """Problems of this step. An exception, which damaged records may cause, is reported as one, too."""
        ...

    def summary(self) -> str:
        """The amount checked, or the reason why nothing was."""
        ...


def floats(values: Sequence[float | None]) -> np.ndarray:
    """Recorded logprobs as float32; null is −inf."""
    return np.array([-np.inf if value is None else value for value in values], dtype=np.float32)


class Files:
    """Rollout files against the certificate (digest, logprobs bit by bit) and against the ledger."""

    name = "rollouts"

    def __init__(self, run: History) -> None:
        self.run, self.completions, self.steps = run, 0, 0
        self.seen: set[str] = set()

    def check(self, step: Rollouts) -> list[str]:
        rows, line, problems = step.rows, step.line, list[str]()
        stale = self.run.section("rollout.drift").get("stale_steps", 0)  # older weights than the trainer's, on purpose
        self.completions, self.steps = self.completions + len(rows), self.steps + 1
        problems += [f"{row.uid} stands twice in the records" for row in rows if row.uid in self.seen]
        self.seen.update(row.uid for row in rows)
        trained = [row for row in rows if row.trained]
        if step.record is not None:
            counts = {"sampled": len(rows), "trained": len(trained), "rejected": sum(row.rejected for row in rows)}
            problems += [
                f"{step.name}: {count} {name}, {step.record.get(f'ledger/{name}')} in the ledger"
                for name, count in counts.items()
                if step.record.get(f"ledger/{name}") != count
            ]
        if line is None:
            return problems
        if line.rollouts is not None and line.rollouts != step.digest:
            problems.append(f"{step.name} is not the file that the certificate covers")
        if line.held_out:  # its numbers are of other completions
            return problems
        sides = {
            "engine": [row.logprobs for row in trained],
            "trainer": [row.logprobs if row.trainer_logprobs is None else row.trainer_logprobs for row in trained],
        }
        for side, stored in sides.items():
            if bits_digest(list(map(floats, stored))) != getattr(line, side):
                problems.append(f"{step.name}: its logprobs are not those certified ({side})")
        raw = [row.logprobs if row.raw_logprobs is None else row.raw_logprobs for row in trained]
        if line.raw is not None and bits_digest(list(map(floats, raw))) != line.raw.get("engine"):
            problems.append(f"{step.name}: its raw logprobs are not those certified (engine)")
        engine = line.fingerprints.get("engine")
        if engine is not None and any(row.engine != engine for row in rows):
            problems.append(f"{step.name}: its engine is not the one certified")
        if line.versions is not None:
            versions = Counter(str(each) for row in trained for each in as_sample(row).completion.token_versions)
            if versions != line.versions:
                problems.append(f"{step.name}: its tokens are of {dict(versions)}, and {line.versions} are certified")
        wrong = [row.uid for row in trained if not (self.run.is_own or 0 <= line.version - row.policy_version <= stale)]
        if wrong and line.versions is None:
            problems.append(f"{wrong[0]} is of another version than the certificate says ({line.version})")
        return problems

    def summary(self) -> str:
        return f"{self.completions} completions of {self.steps} steps"


class Outcomes:
    """Each completion has one outcome: trained, or rejected or dropped for a reason; and trained ones are not stale."""

    name = "outcomes"

    def __init__(self, run: History) -> None:
        fleet, partial = run.section("fleet"), run.section("rollout.partial")
        self.own = run.is_own
        self.max_age = fleet.get("max_version_lag", 0) + run.section("rollout.drift").get("stale_steps", 0)
        self.carries = bool(partial.get("prompts"))  # from the step in which its prompt was due
        self.max_age += partial["max_version_lag"] if self.carries else 0
        self.outcomes = Counter[str]()

    def check(self, step: Rollouts) -> list[str]:
        problems = []
        for row in step.rows:
            kind, _, why = row.outcome.partition(": ")
            self.outcomes[kind] += 1
            if kind not in ("trained", "rejected", "dropped") or bool(why) != (kind != "trained"):
                problems.append(f"{row.uid} ended as {row.outcome!r}")
            if not self.carries and not row.uid.startswith(f"{step.step}/"):
                problems.append(f"{row.uid} stands among the completions of step {step.step}")
            age = step.step - 1 - row.policy_version
            if kind == "trained" and not self.own and not 0 <= age <= self.max_age:
                problems.append(f"{row.uid} was trained with weights {age} steps old; the run allows {self.max_age}")
            if kind == "trained" and row.finish_reason == "abort":
                problems.append(f"{row.uid} was trained, though it was aborted")
        return problems

    def summary(self) -> str:
        counts = ", ".join(f"{count} {kind}" for kind, count in self.outcomes.items()) or "none"
        return counts + "; ages not checked: the loop is not rlloop's" * self.own


class Requests:
    """Completions against their requests: the task's prompts in order, sampling parameters and seed; and each ends as
    its finish reason says."""

    name = "requests"

    def __init__(self, config: RunConfig, parts: Parts) -> None:
        self.config, self.parts = config, parts
        self.given = getattr(parts.task, "gives_completions", False)  # which end where the data's do
        self.batches, self.checked, self.examples = 0, 0, 0
        self.expected_step = 1
        self.seen = set[tuple[int, int, int]]()  # of conversations that may end in any step

    def check(self, step: Rollouts) -> list[str]:
        if self.config.rollout.partial.prompts:
            return self._check_carried(step)
        config = self.config.rollout
        rows = {row.position[1:]: row for row in step.rows}
        batches = -(-(1 + max((prompt for prompt, _ in rows), default=0)) // config.num_prompts)
        expected = {(p, g) for p in range(batches * config.num_prompts) for g in range(config.group_size)}
        problems = [f"{step.step}/{p}/{g} is missing" for p, g in sorted(expected - rows.keys())]
        problems += [f"{rows[position].uid} was never asked for" for position in sorted(rows.keys() - expected)]
        if batches > 1 + self.config.algorithm.max_refills:
            problems.append(f"step {step.step} has completions of {batches} batches of prompts")
        trained = [row.position for row in step.rows if row.trained]
        if trained != sorted(trained):
            problems.append(f"step {step.step}: what was trained does not stand in the order of its prompts")
        problems += self._against_task(step, batches, rows)
        for (prompt, index), row in rows.items():
            if row.group != prompt:
                problems.append(f"{row.uid} stands in group {row.group}")
            fault = self._fault(row, training_sampling(self.config, step.step, prompt, index))
            problems += [] if fault is None else [f"{row.uid}: {fault}"]
        self.checked += len(rows)
        return problems

    def _check_carried(self, step: Rollouts) -> list[str]:
        """Conversations that ended in this step, under `rollout.partial`: whole groups, each of them once."""
        config, groups, problems = self.config.rollout, dict[tuple[int, int], list[Row]](), list[str]()
        for row in step.rows:
            batch, prompt, index = row.position
            groups.setdefault((batch, prompt), []).append(row)
            if row.position in self.seen or not (0 <= prompt < config.num_prompts and 0 <= index < config.group_size):
                problems.append(f"{row.uid} was never asked for, or has ended before")
            self.seen.add(row.position)
            fault = self._fault(row, training_sampling(self.config, batch, prompt, index))
            problems += [] if fault is None else [f"{row.uid}: {fault}"]
            if self.parts.task is not None:
                problems += self._prompt_problems(
                    row, self.parts.task.train_examples(batch, config.num_prompts)[prompt]
                )
        problems += [
            f"{batch}/{prompt} has {len(rows)} conversations, in groups {sorted({row.group for row in rows})}"
            for (batch, prompt), rows in groups.items()
            if len(rows) != config.group_size or len({row.group for row in rows}) > 1
        ]
        self.checked += len(step.rows)
        return problems

    def summary(self) -> str:
        why = self.parts.no_task
        prompts = f"{self.examples} prompts against the task" if why is None else f"prompts not checked: {why}"
        ends = (
            "seeds and ends"
            if self.parts.vocabulary is not None
            else "seeds (no weights are stored, so no stop tokens)"
        )
        return f"{self.checked} {ends}; {prompts}"

    def _against_task(self, step: Rollouts, batches: int, rows: dict[tuple[int, int], Row]) -> list[str]:
        """Prompts against the task's. Its batches come in order, so after a missing step there is nothing to compare.

        `rows`: by (prompt, index in its group).
        """
        first, self.batches = self.batches + 1, self.batches + batches
        if self.parts.task is None or step.step != self.expected_step:
            return []
        self.expected_step += 1
        size, problems = self.config.rollout.num_prompts, []
        for batch in range(batches):
            examples = self.parts.task.train_examples(first + batch, size)
            for (prompt, _), row in rows.items():
                if prompt // size != batch:
                    continue
                problems += self._prompt_problems(row, examples[prompt % size])
        return problems

    def _prompt_problems(self, row: Row, example: Example) -> list[str]:
        self.examples += 1
        self.parts.examples[row.uid] = example
        ids = list(example.prompt_ids) or row.prompt_ids  # none where another library renders the prompt
        if (row.example, row.prompt, row.prompt_ids) != (example.id, example.prompt, ids):
            return [f"{row.uid}: its prompt is not the task's ({example.id})"]
        asked = [] if example.model_input is None else [span.digest for span in example.model_input.contents]
        if [each["digest"] for each in row.images or () if each["end"] <= len(row.prompt_ids)] != asked:
            return [f"{row.uid}: its images are not the task's ({example.id})"]
        return []

    def _fault(self, row: Row, asked: SamplingParams) -> str | None:
        """The difference of a completion from its request, or None. Each turn of a conversation ends by itself."""
        completion, vocabulary = as_sample(row).completion, self.parts.vocabulary
        if (vocabulary is None or completion.turns is not None) and completion.sampling != asked:
            return f"it was made with {completion.sampling}, and asked for with {asked}"
        if vocabulary is None or self.given:
            return None
        if completion.turns is None:
            return fault_of(completion, row.prompt_ids, asked, vocabulary)
        for start, end in completion.turns:
            turn = completion.token_ids[start:end]
            ended = bool(turn) and turn[-1] in stop_ids(asked, vocabulary.eos_token_ids)
            fault = ending_fault(turn, "stop" if ended else "length", asked, vocabulary.eos_token_ids)
            if fault is not None and completion.finish_reason != "abort":
                return fault
        return None


class Advantages:
    """Advantages computed again from the stored rewards, and the choice of completions that are trained."""

    name = "advantages"

    def __init__(self, config: RunConfig, parts: Parts) -> None:
        self.config, self.checked, self.obstacle = config, 0, parts.no_advantage
        if config.algorithm.reward_kl_coef:
            self.obstacle = "algorithm.reward_kl_coef takes the reference's KL from rewards"
        if self.obstacle is None:
            self.estimate = advantages_for(config.algorithm, config.rollout.max_tokens, config.rollout.group_size)

    def check(self, step: Rollouts) -> list[str]:
        if self.obstacle is not None:
            return []
        accepted = sorted((row for row in step.rows if not row.rejected), key=lambda row: row.position)
        problems = [
            f"{row.uid} was rejected, and has an advantage" for row in step.rows if row.rejected and row.advantage
        ]
        advantages, keep = self.estimate(
            [row.reward for row in accepted],
            [row.group for row in accepted],
            [
                max((end - start for start, end in row.turns or [(0, len(row.token_ids))]), default=0)
                for row in accepted
            ],
            None,
        )
        kept = list(dict.fromkeys(row.group for row, good in zip(accepted, keep, strict=True) if good))
        full = set(kept[: self.config.rollout.num_prompts])
        for row, advantage, good in zip(accepted, advantages, keep, strict=True):
            self.checked += 1
            if not math.isclose(row.advantage, advantage, **CLOSE):
                problems.append(
                    f"{row.uid}: its advantage is {row.advantage:.9g}; its group's rewards give {advantage:.9g}"
                )
            if row.trained != (good and row.group in full):
                problems.append(
                    f"{row.uid} is {row.outcome}; by the rewards it is "
                    + ("not to be" if row.trained else "to be trained")
                )
        return problems

    def summary(self) -> str:
        return f"not recomputed: {self.obstacle}" if self.obstacle else f"{self.checked} from the stored rewards"


class Aggregates:
    """Each step's metrics computed again from its completions: lengths, rewards, ledger, and engine against trainer."""

    name = "aggregates"

    def __init__(self, run: History) -> None:
        self.mixes = bool(run.section("fleet").get("max_version_lag") or run.section("rollout.partial").get("prompts"))
        self.own, self.numbers = run.is_own, 0

    def check(self, step: Rollouts) -> list[str]:
        if step.record is None:
            return []
        samples = [as_sample(row) for row in step.rows]
        accepted = [sample for sample, row in zip(samples, step.rows, strict=True) if not row.rejected]
        trained = [sample for sample, row in zip(samples, step.rows, strict=True) if row.trained]
        scored = [
            sample.completion.logprobs if row.trainer_logprobs is None else floats(row.trainer_logprobs)
            for sample, row in zip(samples, step.rows, strict=True)
            if row.trained
        ]
        compared = compare(trained, scored)
        expected: dict[str, Any] = {
            **rollout_metrics(samples, step.step - 1),
            **reward_metrics(accepted),
            **compared.metrics,
            "ledger/sampled": len(samples),
            "ledger/accepted": len(accepted),
            "ledger/rejected": len(samples) - len(accepted),
            "ledger/trained": len(trained),
            "ledger/dropped": len(accepted) - len(trained),
        }
        if self.own:
            del expected["rollout/version_lag"]  # of steps that need not be versions
        if self.mixes and any(set(each.completion.token_versions) != {step.step - 1} for each in trained):
            # The loss measures r under the present weights; what is stored was scored under each token's own.
            expected = {name: value for name, value in expected.items() if not name.startswith("is/")}
        self.numbers += len(expected)
        if step.line is not None and step.line.rollouts is None:  # an older version recorded fewer
            expected = {name: value for name, value in expected.items() if name in step.record}
        problems = [
            f"step {step.step}: {name} is {step.record.get(name)!r:.40}; its completions give {value!r:.40}"
            for name, value in expected.items()
            if not _same(step.record.get(name), value)
        ]
        differ = compared.tokens_different
        if step.line is not None and step.line.tokens_different != differ:
            problems.append(
                f"step {step.step}: {step.line.tokens_different} different tokens certified, {differ} stored"
            )
        return problems

    def summary(self) -> str:
        return f"{self.numbers} numbers of metrics.jsonl from the completions"


def _same(stored: Any, value: Any) -> bool:
    if isinstance(value, float) and not math.isfinite(value):
        return stored is None
    if isinstance(value, int | float):
        return isinstance(stored, int | float) and math.isclose(stored, value, **CLOSE)
    return stored == value


def as_sample(row: Row, images: ImageStore | None = None) -> Sample:
    """The sample that a row records. Raises `ValueError` where tokens and logprobs do not fit each other.

    With the run's `images` the input has those that the row names. Raises `RunError` where one is missing.
    """
    logprobs, prompt = floats(row.logprobs), None
    if images is not None and row.images:
        prompt = images.read_by(row.prompt_ids, row.token_ids, row.images)
    completion = Completion(
        prompt_ids=row.prompt_ids,
        token_ids=row.token_ids,
        logprobs=logprobs,
        raw_logprobs=logprobs if row.raw_logprobs is None else floats(row.raw_logprobs),
        policy_version=row.policy_version,
        finish_reason=row.finish_reason,
        sampling=SamplingParams(**{"max_tokens": 1, **row.sampling}),
        turns=None if row.turns is None else tuple(row.turns),
        versions=None if row.versions is None else tuple(row.versions),
        version_spans=None if row.version_spans is None else tuple(row.version_spans),
        model_input=prompt,
    )
    written = completion.written
    if len(logprobs) != len(written) or (written and written[-1] >= len(completion.token_ids)):
        raise ValueError(f"{row.uid} has {len(completion.token_ids)} tokens and {len(completion.logprobs)} logprobs")
    result = RewardResult(row.reward, row.solved, row.components)
    example = Example(row.example, row.prompt_ids, row.prompt, {})
    return Sample(row.uid, example, completion, row.text, result, row.group, row.advantage)
