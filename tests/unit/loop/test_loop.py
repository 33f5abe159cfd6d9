import dataclasses
import json
import zlib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from rlloop.algorithms import advantages_for
from rlloop.config.run import (
    AlgorithmConfig,
    Anchor,
    CheckpointConfig,
    EvalConfig,
    ParityConfig,
    ParityMode,
    RolloutConfig,
    RunConfig,
)
from rlloop.config.trainer import TrainerConfig
from rlloop.errors import ParityError, RunError
from rlloop.loop.loop import RewardsFailed
from rlloop.loop.step_data import completion_seed
from rlloop.parity.certificate import comparison_of, find_breaks
from rlloop.parity.monitor import Finding
from rlloop.runs.folder import read_records
from rlloop.testing import FakeEngine, FakePolicy, FakeScorer, FakeSync, FakeTrainer, fake_reward
from rlloop.types import RewardResult
from tests.support.loop_run import Run, config


def test_one_record_a_step_with_evaluations_first_and_last(tmp_path):
    run = Run(tmp_path)
    assert run() == 4
    metrics = run.metrics()
    assert [record["step"] for record in metrics] == [0, 1, 2, 3, 4]
    assert [record["step"] for record in metrics if "eval/solved" in record] == [0, 4]
    compared = {"tokens", "tokens_different", "raw_different", "redrawn", "redrawn_different", "k3"}
    assert set(metrics[0]) == {"step"} | {f"eval/{name}" for name in ("solved", "reward", "draws", *compared)}
    for record in (metrics[0], metrics[-1]):
        assert record["eval/redrawn"] == record["eval/tokens"] > 8
        assert not any(record[f"eval/{name}"] for name in compared - {"tokens", "redrawn"})
    assert [line["step"] for line in read_records(run.folder.parity.path)] == [1, 2, 3, 4]
    assert find_breaks(read_records(run.folder.parity.path)) == []


def test_evaluation_draws_held_out_problems_alone(tmp_path):
    run, drawn = Run(tmp_path), []
    score = run.parts.scorer.score

    def noted(requests):
        drawn.append({example.id.split("-")[0] for _, _, example in requests})
        return score(requests)

    run.parts.scorer.score = noted
    run()
    assert drawn == [{"eval"}, {"train"}, {"train"}, {"train"}, {"train"}, {"eval"}]


def test_the_policy_learns(tmp_path):
    run = Run(tmp_path, config(trainer=TrainerConfig(num_steps=40), rollout=RolloutConfig(16, 8, 6)))
    run()
    metrics = run.metrics()
    assert metrics[-1]["eval/reward"] > 2 * metrics[0]["eval/reward"]


def test_every_version_samples_exactly_one_step(tmp_path):
    run = Run(tmp_path)
    run()
    assert [{row["policy_version"] for row in rows} for rows in run.rollouts()] == [{0}, {1}, {2}, {3}]
    assert run.parts.sync.published == [0, 1, 2, 3, 4]  # pyright: ignore[reportAttributeAccessIssue]


def test_an_engine_of_another_version_stops_the_run(tmp_path):
    stale = SimpleNamespace(publish=lambda version: {})
    with pytest.raises(ParityError, match="2/0/0: its weights are of version 0, and it was asked for of version 1"):
        Run(tmp_path, sync=stale)()


def test_an_engine_may_lag_on_purpose_as_far_as_its_parts_say(tmp_path):
    class Late(FakeSync):
        """Serves the version before the published one."""

        def publish(self, version):
            return super().publish(max(0, version - 1))

    def run(folder: str, lag: int) -> Run:
        policy = FakePolicy()
        engine = FakeEngine(policy)
        return Run(tmp_path / folder, policy=policy, engine=engine, sync=Late(engine), engine_lag=lag)

    late = run("late", 1)
    assert late() == 4
    assert [record["rollout/version_lag"] for record in late.metrics()[1:]] == [0, 1, 1, 1]
    with pytest.raises(ParityError, match="2/0/0: its weights are of version 0, and it was asked for of version 1"):
        run("strict", 0)()


def test_seeds_are_a_function_of_their_coordinates_and_all_different(tmp_path):
    run = Run(tmp_path)
    run()
    seeds = {row["uid"]: row["sampling"]["seed"] for rows in run.rollouts() for row in rows}
    assert len(set(seeds.values())) == len(seeds) == 4 * 4 * 3
    assert seeds["3/2/1"] == completion_seed(5, "train", 3, 2, 1)
    assert completion_seed(5, "train", 3, 2, 1) == 4613697042004051736  # a change would be another experiment
    assert completion_seed(5, "eval", 0, 2, 1) != completion_seed(5, "train", 0, 2, 1)


def test_the_ledger_balances_and_failed_rewards_are_rejected_with_their_reason(tmp_path):
    def flaky(prompt, completion, example):
        if example.id.endswith("-1"):
            return SimpleNamespace(kind="timeout", message="took longer than 1 s")
        return fake_reward(prompt, completion, example)

    def keep_even(rewards, groups, lengths, kl):
        return list(rewards), [group % 2 == 0 for group in groups]

    run = Run(tmp_path, scorer=FakeScorer(flaky), advantages=keep_even)
    run()
    for record, rows in zip(run.metrics()[1:], run.rollouts(), strict=True):
        count = {name: record[f"ledger/{name}"] for name in ("sampled", "accepted", "rejected", "dropped", "trained")}
        assert count == {"sampled": 12, "accepted": 9, "rejected": 3, "dropped": 3, "trained": 6}
        outcomes = [row["outcome"] for row in rows]
        assert outcomes.count("rejected: reward timeout: took longer than 1 s") == 3
        assert outcomes.count("dropped: no signal in its group") == 3
        assert sorted(row["uid"] for row in rows) == sorted({row["uid"] for row in rows})
        assert record["parity/tokens"] == sum(len(row["token_ids"]) for row in rows if row["outcome"] == "trained")
    assert "9 of 12" not in (log := (tmp_path / "run.log").read_text())
    assert "3 of 12 samples rejected, first 1/1/0: reward timeout: took longer than 1 s" in log


@pytest.mark.parametrize("reason", ["abort", "error", "content_filter"])  # whatever it is called
def test_what_did_not_come_to_its_own_end_is_rejected_and_never_trained(tmp_path, reason):
    class Interrupted(FakeEngine):
        def _complete(self, prompt, params):
            made = super()._complete(prompt, params)
            cut = params.seed % 3 == 0
            return dataclasses.replace(made, finish_reason=reason) if cut else made

    policy, trained = FakePolicy(), []

    class Watched(FakeTrainer):
        def forward_backward(self, batch, loss, *, old_logprobs=None):
            trained.extend(sample.completion.finish_reason for sample in batch)
            return super().forward_backward(batch, loss, old_logprobs=old_logprobs)

    run = Run(tmp_path, policy=policy, engine=Interrupted(policy), trainer=Watched(policy))
    run()
    assert set(trained) <= {"stop", "length"}
    cut = [row for rows in run.rollouts() for row in rows if row["finish_reason"] == reason]
    assert cut
    assert {row["outcome"] for row in cut} == {f"rejected: its completion was cut short: finish_reason is {reason!r}"}
    for record in run.metrics()[1:]:
        assert record["ledger/sampled"] == record["ledger/accepted"] + record["ledger/rejected"] == 12
    assert sum(record["ledger/rejected"] for record in run.metrics()[1:]) == len(cut)
    rejected = run.metrics()[0].get("eval/rejected", 0)
    assert run.metrics()[0]["eval/draws"] + rejected == 8
    log = (tmp_path / "run.log").read_text()
    assert (f"{rejected} of 8 held-out samples rejected, first: " in log) == (rejected > 0)


def test_a_reward_that_always_fails_stops_the_run(tmp_path):
    broken = FakeScorer(lambda *_: SimpleNamespace(kind="error", message="KeyError: 'target'"))
    rejected = r"every one of 8 held-out samples was rejected, first: reward error: KeyError: 'target'"
    with pytest.raises(RewardsFailed, match=rejected):
        Run(tmp_path, scorer=broken)()
    assert not (tmp_path / "run.log").exists()  # whoever catches the error logs it, once


def test_a_reward_that_always_fails_in_training_stops_the_run(tmp_path):
    def untrained(prompt, completion, example):
        broken = example.id.startswith("train")
        return SimpleNamespace(kind="error", message="no") if broken else fake_reward(prompt, completion, example)

    with pytest.raises(RewardsFailed, match=r"^every one of 12 samples was rejected, first: reward error: no$"):
        Run(tmp_path, scorer=FakeScorer(untrained))()


def test_a_step_that_drops_everything_moves_nothing_and_is_certified(tmp_path):
    nothing = Run(tmp_path, advantages=lambda rewards, *_: (list(rewards), [False] * len(rewards)))
    nothing()
    assert not nothing.parts.trainer.policy.logits.any()  # pyright: ignore[reportAttributeAccessIssue]
    record = nothing.metrics()[1]
    assert (record["ledger/trained"], record["ledger/dropped"]) == (0, 12)
    assert not any(name.startswith(("parity/", "loss/")) for name in record)  # absent, never 0
    assert find_breaks(read_records(nothing.folder.parity.path)) == []


@pytest.mark.parametrize(("count", "sizes"), [(1, [12]), (2, [6, 6]), (3, [6, 3, 3]), (4, [3, 3, 3, 3])])
def test_minibatches_hold_whole_groups_and_all_samples(tmp_path, count, sizes):
    batches = []

    class Watched(FakeTrainer):
        def forward_backward(self, batch, loss, *, old_logprobs=None):
            batches.append(batch)
            return super().forward_backward(batch, loss, old_logprobs=old_logprobs)

    policy = FakePolicy()
    run = Run(
        tmp_path,
        config(trainer=TrainerConfig(num_steps=1, num_minibatches=count)),
        policy=policy,
        trainer=Watched(policy),
    )
    run()
    assert sorted(map(len, batches), reverse=True) == sizes
    assert len({sample.uid for batch in batches for sample in batch}) == 12
    groups = [{sample.group for sample in batch} for batch in batches]
    assert sum(map(len, groups)) == 4


def anchors(tmp_path, **settings):
    run = Run(tmp_path, config(**settings))
    run()
    return run, run.parts.trainer.anchors  # pyright: ignore[reportAttributeAccessIssue]


def test_one_minibatch_anchors_at_its_own_forward(tmp_path):
    assert anchors(tmp_path)[1] == [None] * 4


def test_later_minibatches_anchor_at_the_trainer_before_the_first(tmp_path):
    run, old = anchors(tmp_path, trainer=TrainerConfig(num_steps=1, num_minibatches=2))
    sampled = {row["uid"]: row["logprobs"] for row in run.rollouts()[0]}
    assert [len(part) for part in old] == [6, 6]
    given = np.concatenate([array for part in old for array in part])
    assert np.array_equal(
        given, np.concatenate(list(sampled.values())).astype(np.float32)
    )  # zero KLD: also the engine's


def test_rollout_anchor_takes_the_engines_logprobs(tmp_path):
    algorithm = AlgorithmConfig(loss="grpo", advantage="group_norm", anchor=Anchor.rollout)
    policy = FakePolicy()
    settings = config(algorithm=algorithm, parity=ParityConfig(ParityMode.observe))
    run = Run(tmp_path, settings, policy=policy, engine=FakeEngine(policy, drift=0.5))
    run()
    old = run.parts.trainer.anchors  # pyright: ignore[reportAttributeAccessIssue]
    assert np.concatenate(old[0])[0] == np.float32(np.log(1 / 8) + 0.5)


@pytest.mark.parametrize("minibatches", [1, 2])
def test_require_stops_before_the_weights_move_and_says_where(tmp_path, minibatches):
    policy = FakePolicy()
    settings = config(trainer=TrainerConfig(num_steps=4, num_minibatches=minibatches))
    doctor = lambda sample, token: Finding(f"layer 1, linear, {sample.uid}", {"op": "linear"})  # noqa: E731
    engines = FakeEngine(policy, drift=1e-6), FakeEngine(policy)
    run = Run(
        tmp_path, settings, policy=policy, engine=engines[0], eval_engine=engines[1], sync=FakeSync(*engines),
        doctor=doctor,
    )  # fmt: skip
    with pytest.raises(ParityError, match=r"step 1: .* First: sequence 1/0/0, token 0 .*\nlayer 1, linear, 1/0/0\n"):
        run()
    assert not policy.logits.any()
    report = json.loads((tmp_path / "parity_report.json").read_text())
    assert (report["step"], report["first"]["uid"], report["doctor"]["op"]) == (1, "1/0/0", "linear")
    assert report["tokens_different"] == report["tokens"] > 0
    assert report["first"]["engine_bits"] != report["first"]["trainer_bits"]
    assert len(run.rollouts()) == 1  # the evidence is kept
    [line] = read_records(run.folder.parity.path)
    assert line["tokens_different"] == report["tokens"]
    assert [record["step"] for record in run.metrics()] == [0]


def test_a_disk_that_is_full_after_a_difference_keeps_no_completion_without_its_report(tmp_path, monkeypatch):
    policy = FakePolicy()
    engines = FakeEngine(policy, drift=1e-6), FakeEngine(policy)
    run = Run(tmp_path, policy=policy, engine=engines[0], eval_engine=engines[1], sync=FakeSync(*engines))
    written = run.folder.write_rollouts

    def full(step, rows):
        written(step, rows)
        raise OSError("no space left on device")

    monkeypatch.setattr(run.folder, "write_rollouts", full)
    with pytest.raises(OSError, match="no space"):
        run()
    assert len(run.rollouts()) == 1
    assert json.loads((tmp_path / "parity_report.json").read_text())["step"] == 1


def test_require_stops_at_the_first_evaluation_with_a_line_and_the_completions(tmp_path):
    policy = FakePolicy()
    doctor = lambda sample, token: Finding(f"layer 1, linear, {sample.uid}", {"op": "linear"})  # noqa: E731
    run = Run(tmp_path, policy=policy, engine=FakeEngine(policy, drift=1e-6), doctor=doctor)
    with pytest.raises(
        ParityError, match=r"step 0: .* held-out tokens.* First: sequence eval/0, token 0 .*\nlayer 1, "
    ):
        run()
    report = json.loads((tmp_path / "parity_report.json").read_text())
    assert (report["step"], report["first"]["uid"], report["doctor"]["op"]) == (0, "eval/0", "linear")
    assert "eval/0" in [row["uid"] for row in report["completions"]]
    [line] = lines = list(read_records(run.folder.parity.path))
    assert (line["step"], line["held_out"], line["tokens_different"]) == (0, True, report["tokens"])
    assert (find_breaks(lines), run.metrics()) == ([], [])
    assert [row["uid"] for row in run.rollouts()[0]] == [f"eval/{index}" for index in range(8)]  # the evidence is kept
    assert Run(tmp_path)() == 4  # with another engine it begins anew
    assert [line["step"] for line in read_records(run.folder.parity.path)] == [1, 2, 3, 4]


@pytest.mark.parametrize("reported", ["logprobs", "tokens"])
def test_an_answer_of_the_first_evaluation_in_the_last_stops_the_run_there(tmp_path, reported):
    class Replaying(FakeEngine):
        """Answers held-out requests by what it said first; `tokens`: with the present seeds, prompts and logprobs."""

        origin, first = "eu/engine", None

        def generate(self, prompts, sampling):
            made = [dataclasses.replace(each, origin=self.origin) for each in super().generate(prompts, sampling)]
            if len(prompts) != 8 or self.origin != "eu/engine":
                return made
            self.first = self.first or made
            if reported == "logprobs" or self.policy_version == 0:
                return [dataclasses.replace(old, policy_version=self.policy_version) for old in self.first]
            table, others = self.policy.logprobs(), [*self.first[1:], self.first[0]]
            return [
                dataclasses.replace(
                    asked, token_ids=old.token_ids, finish_reason=old.finish_reason,
                    logprobs=table[old.token_ids], raw_logprobs=table[old.token_ids],
                ) for asked, old in zip(made, others, strict=True)
            ]  # fmt: skip

    policy = FakePolicy()
    run = Run(tmp_path / "run", policy=policy, engine=Replaying(policy))
    said = "eval/.* draws" if reported == "tokens" else "held-out tokens"
    with pytest.raises(ParityError, match=rf"^step 4: .*{said}.*\nSampled by eu/engine\n"):
        run()
    report = json.loads((tmp_path / "run" / "parity_report.json").read_text())
    assert set(report["engines"].values()) == {"eu/engine"}
    assert set(report["engines"]) == {row["uid"] for row in report["completions"]}
    lines = list(read_records(run.folder.parity.path))
    assert [line.get("held_out") for line in lines] == [None, None, None, True]
    assert find_breaks(lines) == []
    assert [record["step"] for record in run.metrics()] == [0, 1, 2, 3]
    policy = FakePolicy()
    honest, whole = Replaying(policy), Run(tmp_path / "whole")
    honest.origin = "us/engine"
    again = Run(tmp_path / "run", policy=policy, engine=honest)
    assert (again(), whole()) == (4, 4)
    assert again.metrics() == whole.metrics()


def test_observe_goes_on_and_measures(tmp_path):
    policy = FakePolicy()
    run = Run(
        tmp_path, config(parity=ParityConfig(ParityMode.observe)), policy=policy, engine=FakeEngine(policy, drift=1e-3)
    )
    assert run() == 4
    assert [record.get("eval/tokens_different") for record in run.metrics()] == [1.0, None, None, None, 1.0]
    for record in run.metrics()[1:]:
        assert record["parity/tokens_different"] == 1.0
        assert record["parity/k1"] == pytest.approx(1e-3, rel=1e-3)
        assert record["parity/k3"] == pytest.approx(0.5e-6, rel=1e-2)
    for row in run.rollouts()[0]:
        assert row["trainer_logprobs"] != row["logprobs"]


def test_the_reported_policy_may_be_another_engines_and_then_both_are_evaluated(tmp_path):
    policy, other = FakePolicy(), FakePolicy()
    other.logits[3] = 9.0  # an engine whose weights are not the trainer's: it says the target all the time
    sampler, reporter = FakeEngine(other), FakeEngine(policy)
    run = Run(
        tmp_path, config(parity=ParityConfig(ParityMode.observe)), policy=policy, engine=sampler, eval_engine=reporter,
        sync=FakeSync(sampler, reporter),
    )  # fmt: skip
    run()
    assert (sampler.generated, reporter.generated) == (4 * 12 + 2 * 8, 2 * 8)
    assert run.metrics()[0]["eval/engine_reward"] > 0.9
    assert run.metrics()[0]["eval/reward"] < 0.5
    assert run.metrics()[0]["eval/tokens_different"] == 0.0  # the reporter's; the other is not compared here
    assert run.metrics()[1]["parity/tokens_different"] == 1.0


def test_parts_with_a_state_of_their_own_are_in_the_checkpoints(tmp_path):
    class Kept:
        text = "new"

        def save(self, folder):
            (folder / "kept.txt").write_text(self.text)

        def restore(self, folder):
            self.text = (folder / "kept.txt").read_text()

    first, second = Kept(), Kept()
    first.text = "old"
    assert Run(tmp_path, stateful=(first,))() == 4
    assert Run(tmp_path, stateful=(second,))() == 4  # finds the checkpoint of the last step
    assert second.text == "old"


def test_what_a_sync_measured_stands_in_the_step_that_it_served(tmp_path):
    class Measured(FakeSync):
        def publish(self, version):
            return {**super().publish(version), "sync/version": version}

    policy = FakePolicy()
    engine = FakeEngine(policy)
    run = Run(
        tmp_path, config(eval=EvalConfig(every=1, num_draws=8)), policy=policy, engine=engine, sync=Measured(engine)
    )
    run()
    assert [record["sync/version"] for record in run.metrics()[1:]] == [0, 1, 2, 3]


def unbroken(path: Path) -> Run:
    run = Run(path)
    run()
    return run


def same_history(a: Run, b: Run) -> bool:
    files = ("metrics", "parity")
    logs = all(getattr(a.folder, name).path.exists() == getattr(b.folder, name).path.exists() for name in files)
    certificates = [[comparison_of(line) for line in read_records(run.folder.parity.path)] for run in (a, b)]
    weights = [run.parts.trainer.policy.logits.tolist() for run in (a, b)]  # pyright: ignore[reportAttributeAccessIssue]
    return (
        logs
        and a.metrics() == b.metrics()
        and certificates[0] == certificates[1]
        and a.rollouts() == b.rollouts()
        and weights[0] == weights[1]
    )


@pytest.mark.parametrize("stop", [1, 2, 3])
def test_asked_to_stop_it_saves_and_resumes_to_the_same_history(tmp_path, stop):
    first = Run(tmp_path / "run")
    asked = iter([False] * (stop - 1) + [True])
    assert first(lambda: next(asked)) == stop
    assert (tmp_path / "run" / "checkpoints" / f"step_{stop}").is_dir()
    second = Run(tmp_path / "run")
    assert second() == 4
    assert same_history(second, unbroken(tmp_path / "other"))
    assert not (tmp_path / "run" / "orphaned").exists()


class PowerCut(BaseException):
    pass


@pytest.mark.parametrize("cut", range(1, 16))
def test_cut_off_anywhere_it_resumes_to_the_same_history(tmp_path, cut, monkeypatch):
    """Cut at each call that reaches the disk in turn: rollouts, certificate, metrics, checkpoint."""
    calls = {"left": cut}
    import rlloop.runs.folder as records

    def counted(function):
        def call(*args, **kwargs):
            calls["left"] -= 1
            if calls["left"] == 0:
                raise PowerCut
            return function(*args, **kwargs)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(records.Journal, "append", counted(records.Journal.append))
        patch.setattr(records, "write_whole", counted(records.write_whole))
        patch.setattr(FakeTrainer, "save", counted(FakeTrainer.save))
        with pytest.raises(PowerCut):
            Run(tmp_path / "run")()
    again = Run(tmp_path / "run")
    assert again() == 4
    assert same_history(again, unbroken(tmp_path / "other"))


def test_a_certificate_that_is_not_the_checkpoints_is_refused(tmp_path):
    unbroken(tmp_path)
    file = tmp_path / "parity.jsonl"
    file.write_bytes(b"".join(file.read_bytes().splitlines(keepends=True)[:-1]))
    with pytest.raises(RunError, match=r"is not the certificate .* another folder \(run.dir\)"):
        Run(tmp_path)()


def test_a_reward_components_are_logged_by_name(tmp_path):
    run = Run(tmp_path, scorer=FakeScorer(lambda *_: RewardResult(0.5, components={"format": 0.25})))
    run()
    assert run.metrics()[1]["reward/format"] == 0.25
    assert run.metrics()[1]["reward/groups_without_signal"] == 1.0


def filtering(refills: int, **algorithm) -> RunConfig:
    settings = AlgorithmConfig("grpo", "group_mean", dynamic_sampling=True, max_refills=refills, **algorithm)
    return config(algorithm=settings, trainer=TrainerConfig(num_steps=2), checkpoint=CheckpointConfig(every=1))


def without_signal(*dull: int) -> FakeScorer:
    """Every completion has a reward of its own, but those of each batch's prompts `dull` are all judged alike."""
    ends = tuple(f"-{index}" for index in dull)
    return FakeScorer(lambda _, text, example: 1.0 if example.id.endswith(ends) else zlib.crc32(text.encode()) / 2**32)


def scored(scorer: FakeScorer) -> FakeScorer:
    return FakeScorer(lambda *request: RewardResult(scorer.reward(*request)))


@pytest.mark.parametrize(
    ("dull", "rounds", "full"),
    [((), 1, 0), ((0,), 2, 2), ((0, 1), 2, 0), ((0, 1, 2, 3), 3, 0)],
    ids=["all teach", "two too many", "just enough", "none ever"],
)
def test_dynamic_sampling_goes_on_until_the_batch_is_full_of_groups_that_teach(tmp_path, dull, rounds, full):
    settings = filtering(2)
    run = Run(
        tmp_path,
        settings,
        scorer=scored(without_signal(*dull)),
        advantages=advantages_for(settings.algorithm, max_tokens=6, group_size=3),
    )
    run()
    outcomes = [row["outcome"] for row in run.rollouts()[0]]
    assert len(outcomes) == rounds * 4 * 3
    assert outcomes.count("dropped: no signal in its group") == rounds * len(dull) * 3
    assert outcomes.count("dropped: the batch is full") == full * 3
    assert outcomes.count("trained") == (rounds * (4 - len(dull)) - full) * 3
    assert run.metrics()[1]["ledger/sampled"] == len(outcomes)
    assert run.metrics()[1]["ledger/dropped"] == len(outcomes) - outcomes.count("trained")
    assert {row["example"].split("-")[1] for row in run.rollouts()[1]} == {
        str(batch) for batch in range(rounds + 1, 2 * rounds + 1)
    }, "the second step goes on where the first one stopped taking prompts"


def test_refilled_runs_resume_with_the_prompts_that_would_have_come(tmp_path):
    settings = filtering(2)

    def run(name: str) -> Run:
        estimate = advantages_for(settings.algorithm, max_tokens=6, group_size=3)
        return Run(tmp_path / name, settings, scorer=scored(without_signal(0)), advantages=estimate)

    whole = run("whole")
    whole()
    run("cut")(should_stop=lambda: True)
    second = run("cut")
    second()
    assert second.metrics() == whole.metrics()
    assert second.rollouts() == whole.rollouts()


def test_kl_to_the_reference_is_taken_from_the_reward_before_advantages(tmp_path):
    settings = config(algorithm=AlgorithmConfig("grpo", "raw", reward_kl_coef=0.5), trainer=TrainerConfig(num_steps=1))
    policy = FakePolicy()
    policy.logits[2] = 1.0
    run = Run(tmp_path, settings, policy=policy, advantages=advantages_for(settings.algorithm, 6, 3))
    run()
    rows = run.rollouts()[0]
    kl = [sum(np.float32(logprob) for logprob in row["logprobs"]) + np.log(8) * len(row["logprobs"]) for row in rows]
    assert [row["advantage"] for row in rows] == pytest.approx(
        [row["reward"] - 0.5 * each for row, each in zip(rows, kl, strict=True)], abs=1e-5
    )
    assert run.metrics()[1]["reward/kl_ref"] == pytest.approx(np.mean(kl), abs=1e-5)
    assert run.metrics()[1]["reward/mean"] == pytest.approx(np.mean([row["reward"] for row in rows]))
