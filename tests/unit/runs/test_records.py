import hashlib
import shutil
from pathlib import Path

import msgspec
import numpy as np
import pytest

from rlloop.config.resume import refuse_other_run, without_logins
from rlloop.errors import RunError
from rlloop.runs.folder import (
    Journal,
    RunFolder,
    read_config,
    read_records,
    read_rollouts,
    require_run,
    rollout_files,
    summarize,
)
from rlloop.runs.rollouts import rollout_rows
from rlloop.types import Completion, Example, RewardResult, Sample, SamplingParams
from tests.support.dashboard_runs import make_sample

RUN = Path("run")
CONFIG = {"seed": 0, "trainer": {"lr": 0.1, "num_steps": 5, "schedule": "constant"}, "parity": {"mode": "require"}}


def steps(path) -> list[int]:
    return [record["step"] for record in read_records(path)]


def filled(tmp_path, last: int) -> RunFolder:
    folder = RunFolder(tmp_path / "run")
    for step in range(last + 1):
        folder.metrics.append({"step": step})
        if step:
            folder.parity.append({"step": step})
            folder.write_rollouts(step, [{"uid": f"{step}/0/0"}])
    return folder


def test_a_torn_last_line_is_not_a_record(tmp_path):
    journal = Journal(tmp_path / "metrics.jsonl")
    journal.append({"step": 0})
    journal.append({"step": 1})
    content = journal.path.read_bytes()
    for cut in range(len(content) // 2 + 1, len(content)):
        journal.path.write_bytes(content[:cut])
        assert steps(journal.path) == [0]


def test_a_damaged_line_inside_is_named(tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 0}\n{"st\n{"step": 2}\n')
    with pytest.raises(RunError, match="line 2"):
        list(read_records(tmp_path / "metrics.jsonl"))


DAMAGE = [
    b"",
    b"{",
    b"null",
    b"[]",
    b'"\xff"',
    b'{"a": ' + b"9" * 5000 + b"}",
    b"[" * 100_000,
    b"\0" * 20,
    b'{"step": "1"}',
]


@pytest.mark.parametrize("damage", DAMAGE, ids=range(len(DAMAGE)))
def test_what_is_damaged_at_a_resume_is_named_with_what_to_do(tmp_path, damage):
    with filled(tmp_path, last=5) as folder:
        file = folder.path / "summary.json"
        file.write_bytes(damage)
        if damage.startswith(b'{"step"'):  # which is JSON
            assert not folder.is_finished(3)
        else:
            with pytest.raises(RunError, match=r"summary\.json is damaged: .*; delete it"):
                folder.is_finished(3)
        file = folder.path / "fingerprints.json"
        file.write_bytes(damage)
        with pytest.raises(RunError, match=r"fingerprints\.json is damaged: .*; restore it from a copy"):
            folder.note_fingerprints({"digest": {}})
        whole = folder.metrics.path.read_bytes()
        lines = whole.splitlines(keepends=True)
        folder.metrics.path.write_bytes(b"".join([*lines[:2], damage + b"\n", *lines[3:]]))
        before = sorted(folder.path.rglob("*"))
        with pytest.raises(RunError, match=r"metrics\.jsonl, line 3, is damaged: .*; restore it from a copy"):
            folder.rewind(4)
        assert sorted(folder.path.rglob("*")) == before  # nothing was moved
        folder.metrics.path.write_bytes(whole)
        assert folder.rewind(3) == 2


@pytest.mark.parametrize("name", ["notes.txt", "step_x.jsonl.zst", "step_00000002.jsonl", "step_00000002.jsonl.zst.gz"])
def test_a_foreign_file_among_the_rollouts_is_named_before_anything_is_moved(tmp_path, name):
    with filled(tmp_path, last=5) as folder:
        (folder.rollouts / name).write_text("mine")
        assert len(rollout_files(folder.path)) == 5
        with pytest.raises(RunError, match=rf"{name} is not one of the run's files; move it elsewhere"):
            folder.rewind(3)
        assert steps(folder.metrics.path) == [0, 1, 2, 3, 4, 5]
        (folder.rollouts / name).unlink()
        assert folder.rewind(3) == 2


def test_records_set_aside_never_share_a_folder(tmp_path):
    with filled(tmp_path, last=5) as folder:
        for step in (4, 3):
            folder.rewind(step)
        shutil.rmtree(folder.path / "orphaned" / "1")
        folder.rewind(2)
        aside = {each.name: steps(each / "metrics.jsonl") for each in (folder.path / "orphaned").iterdir()}
        assert aside == {"2": [4], "3": [3]}


def test_numbers_that_are_not_finite_become_null(tmp_path):
    journal = Journal(tmp_path / "metrics.jsonl")
    journal.append({"step": 1, "loss": float("nan"), "k3": float("inf")})
    assert list(read_records(journal.path)) == [{"step": 1, "loss": None, "k3": None}]


@pytest.mark.parametrize("torn", [b"", b'{"step": 6, "rew'])
def test_rewind_leaves_one_history_and_keeps_the_other(tmp_path, torn):
    with filled(tmp_path, last=5) as folder:
        with folder.metrics.path.open("ab") as file:
            file.write(torn)
        assert folder.rewind(3) == 2
        assert steps(folder.metrics.path) == [0, 1, 2, 3]
        assert steps(folder.parity.path) == [1, 2, 3]
        assert [file.name for file in rollout_files(folder.path)] == [f"step_0000000{i}.jsonl.zst" for i in (1, 2, 3)]
        aside = folder.path / "orphaned" / "1"
        assert steps(aside / "metrics.jsonl") == [4, 5]
        assert steps(aside / "parity.jsonl") == [4, 5]
        assert [file.name for file in rollout_files(aside)] == ["step_00000004.jsonl.zst", "step_00000005.jsonl.zst"]
        assert (aside / "metrics.jsonl").read_bytes().endswith(torn or b"}\n")
        folder.metrics.append({"step": 4})
        assert steps(folder.metrics.path) == [0, 1, 2, 3, 4]


def test_rewind_to_nothing_and_again(tmp_path):
    with filled(tmp_path, last=2) as folder:
        folder.rewind(None)
        assert steps(folder.metrics.path) == []
        folder.metrics.append({"step": 0})
        folder.rewind(None)
        assert steps(folder.path / "orphaned" / "2" / "metrics.jsonl") == [0]
        assert folder.rewind(None) == 0
        assert len(list((folder.path / "orphaned").iterdir())) == 2


def test_the_report_of_a_broken_step_does_not_stay_with_the_run_that_goes_on(tmp_path):
    with filled(tmp_path, last=3) as folder:
        folder.parity.append({"step": 4})
        folder.write_json("parity_report.json", {"step": 4})
        assert folder.rewind(3) == 0
        assert not (folder.path / "parity_report.json").exists()
        assert (folder.path / "orphaned" / "1" / "parity_report.json").exists()


def test_rewind_does_nothing_to_a_clean_history(tmp_path):
    with filled(tmp_path, last=3) as folder:
        assert folder.rewind(3) == 0
        assert not (folder.path / "orphaned").exists()
        assert steps(folder.metrics.path) == [0, 1, 2, 3]


def test_two_processes_cannot_hold_one_folder_nor_one_a_models(tmp_path):
    with RunFolder(tmp_path / "run"), pytest.raises(RunError, match="another process"):
        RunFolder(tmp_path / "run")
    RunFolder(tmp_path / "run").__exit__()
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    with pytest.raises(RunError, match="model is a model's folder"):
        RunFolder(tmp_path / "model")


def test_a_run_does_not_hide_the_runs_below_its_folder(tmp_path):
    run = tmp_path / "runs" / "sweep" / "a"
    with RunFolder(run) as folder:
        folder.adopt({"seed": 0})
    for above in (run.parent, run.parent.parent):
        with pytest.raises(RunError, match=rf"holds other runs, such as {run}; choose a folder of this run's own"):
            RunFolder(above)
        assert not (above / ".lock").exists()
    (tmp_path / "new" / "data").mkdir(parents=True)
    (tmp_path / "new" / "before").symlink_to(run)  # which is not hidden where it lies
    for free in (tmp_path / "new", run):
        RunFolder(free).__exit__()


def test_nor_after_somebody_deleted_the_lock(tmp_path):
    with RunFolder(tmp_path / "run"):
        (tmp_path / "run" / ".lock").unlink()
        with pytest.raises(RunError, match="another process"):
            RunFolder(tmp_path / "run")
    RunFolder(tmp_path / "run").__exit__()


def test_a_process_whose_folder_was_replaced_does_not_write_into_the_other(tmp_path):
    with filled(tmp_path, last=2) as first:
        (tmp_path / "run").rename(tmp_path / "elsewhere")
        with filled(tmp_path, last=1) as second:
            with pytest.raises(RunError, match="moved or replaced"):
                first.write_rollouts(3, [])
            with pytest.raises(RunError, match="another process writes the same run"):
                first.metrics.append({"step": 3})
            assert steps(second.metrics.path) == [0, 1]
            assert [file.name for file in rollout_files(second.path)] == ["step_00000001.jsonl.zst"]


def test_another_writer_is_noticed_before_the_next_line(tmp_path):
    ours, theirs = (Journal(tmp_path / "metrics.jsonl") for _ in range(2))
    ours.append({"step": 0})
    theirs.append({"step": 1})
    with pytest.raises(RunError, match="another process writes the same run"):
        ours.append({"step": 1})
    assert steps(ours.path) == [0, 1]


def test_a_resumed_run_s_configuration_is_written_when_it_goes_on(tmp_path):
    """Until then config.yaml is the one that the certificate speaks of."""
    with RunFolder(tmp_path / "run") as folder:
        first = folder.adopt(CONFIG)
        folder.metrics.append({"step": 0})
    before = (tmp_path / "run" / "config.yaml").read_bytes()
    with RunFolder(tmp_path / "run") as folder:
        longer = folder.adopt(changed(trainer={"num_steps": 9}))
        assert longer != first
        assert (tmp_path / "run" / "config.yaml").read_bytes() == before
        folder.confirm()
        assert hashlib.sha256((tmp_path / "run" / "config.yaml").read_bytes()).hexdigest() == longer


def changed(**sections) -> dict:
    return {
        key: {**value, **sections.get(key, {})} if isinstance(value, dict) else value for key, value in CONFIG.items()
    }


def test_another_meaning_is_refused_by_key(tmp_path):
    with RunFolder(tmp_path / "run") as folder:
        folder.adopt(changed(trainer={"lr": 0.3}))
        folder.adopt(CONFIG)  # nothing was recorded under the other one
        folder.metrics.append({"step": 0})
        with pytest.raises(RunError, match=r"trainer\.lr: the run has 0\.1, now it is 0\.2"):
            folder.adopt(changed(trainer={"lr": 0.2}))
        with pytest.raises(RunError, match=r"seed: .*\n.* start a new run in another folder \(run.dir\)"):
            folder.adopt({**CONFIG, "seed": 1})
        folder.adopt(CONFIG)


def test_a_run_whose_address_had_a_login_goes_on_without_it_and_the_login_is_not_told():
    with_login, without = (
        {**CONFIG, "reward": {"url": f"https://{login}judge/x", "token_env": name}}
        for login, name in (("me:password@", None), ("", "LOGIN"))
    )
    refuse_other_run(RUN, with_login, without)
    with pytest.raises(RunError, match=r"reward\.url: the run has 'https://judge/x', now it is 'https://other/x'"):
        refuse_other_run(RUN, with_login, {**CONFIG, "reward": {"url": "https://other/x", "token_env": None}})


@pytest.mark.parametrize("key", ["sinks.alerts.webhook", "sinks.mlflow.uri", "certificate.witness", "fleet.store"])
def test_logins_that_runs_of_earlier_versions_recorded_are_not_shown(key):
    assert without_logins({key: "https://me:s3cret@host/@x"}) == {key: "https://host/@x"}


def test_only_a_url_loses_what_stands_before_an_at():
    with pytest.raises(RunError, match=r"task\.revision: the run has 'x://alice@v1', now it is 'x://bob@v1'"):
        refuse_other_run(RUN, *({**CONFIG, "task": {"revision": f"x://{name}@v1"}} for name in ("alice", "bob")))


def test_a_run_older_than_a_key_goes_on_with_its_default():
    refuse_other_run(RUN, CONFIG, {**CONFIG, "algorithm": {"max_refills": 0}})
    with pytest.raises(RunError, match=r"algorithm\.max_refills: the run has 0, now it is 3"):
        refuse_other_run(RUN, CONFIG, {**CONFIG, "algorithm": {"max_refills": 3}})


def test_only_a_constant_schedule_may_grow():
    refuse_other_run(RUN, CONFIG, changed(trainer={"num_steps": 9}))
    falling = changed(trainer={"schedule": "linear"})
    with pytest.raises(RunError, match=r"trainer\.num_steps"):
        refuse_other_run(RUN, falling, changed(trainer={"schedule": "linear", "num_steps": 9}))


def test_another_number_of_engines_goes_on_with_the_run():
    alone, four = ({**CONFIG, "launch": "ray", "ray": {"replicas": replicas}} for replicas in (0, 4))
    refuse_other_run(RUN, alone, four)


def test_engine_sizes_may_change_while_the_contract_is_enforced():
    small, large = ({**CONFIG, "rollout": {"page_size": size}} for size in (16, 64))
    refuse_other_run(RUN, small, large)
    observed = {"parity": {"mode": "observe"}}
    with pytest.raises(RunError, match=r"rollout\.page_size"):
        refuse_other_run(RUN, {**small, **observed}, {**large, **observed})


def sample(logprobs: np.ndarray, raw: np.ndarray) -> Sample:
    params = SamplingParams(max_tokens=400, temperature=0.5, seed=3)
    made = Completion([1], list(range(len(logprobs))), logprobs, raw, 4, "stop", params)
    return Sample("5/0/1", Example("p", [1], "one", {}), made, "text", RewardResult(1.0, True, {"part": 0.5}), 0, 0.25)


def test_stored_logprobs_round_trip_to_the_bit(tmp_path):
    bits = np.random.default_rng(0).integers(0, 2**31, 300, dtype=np.int32)
    values = -np.abs(bits.view(np.float32))
    values = values[np.isfinite(values)]
    other = np.nextafter(values, np.float32(-np.inf))
    with RunFolder(tmp_path / "run") as folder:
        samples = [sample(values, values), sample(values, other)]
        rows = rollout_rows(samples, ["trained", "dropped: x"], [values, other], "e")
        folder.write_rollouts(5, rows)
        same, differing = read_rollouts(folder.path / "rollouts" / "step_00000005.jsonl.zst")
    assert np.array_equal(np.array(same["logprobs"], dtype=np.float32).view(np.int32), values.view(np.int32))
    assert "trainer_logprobs" not in same
    assert "raw_logprobs" not in same
    for key in ("trainer_logprobs", "raw_logprobs"):
        assert np.array_equal(np.array(differing[key], dtype=np.float32).view(np.int32), other.view(np.int32))
    assert same["sampling"] == {"max_tokens": 400, "temperature": 0.5, "seed": 3}
    assert (same["uid"], same["policy_version"], same["solved"], same["components"]) == (
        "5/0/1",
        4,
        True,
        {"part": 0.5},
    )


def test_a_logprob_that_is_not_finite_is_null(tmp_path):
    values = np.array([-1.0, -np.inf, np.nan], dtype=np.float32)
    with RunFolder(tmp_path / "run") as folder:
        folder.write_rollouts(1, rollout_rows([sample(values, values)], ["rejected: x"], [None], "e"))
        assert read_rollouts(rollout_files(folder.path)[0])[0]["logprobs"] == [-1.0, None, None]


def test_what_is_no_run_is_refused_by_name(tmp_path):
    with pytest.raises(RunError, match="nosuch"):
        require_run(tmp_path / "nosuch")
    with RunFolder(tmp_path / "sweep" / "seed=0") as folder:
        folder.adopt(CONFIG)
    with pytest.raises(RunError, match="seed=0"):
        require_run(tmp_path / "sweep")
    assert require_run(tmp_path / "sweep" / "seed=0")
    with pytest.raises(RunError, match=r"no such folder \(did you mean seed=0\?\)"):
        require_run(tmp_path / "sweep" / "sed=0")


@pytest.mark.parametrize("keep", [0.5, 0.0])
def test_damaged_rollouts_are_named(tmp_path, keep):
    with RunFolder(tmp_path / "run") as folder:
        folder.write_rollouts(3, [{"uid": f"3/0/{index}", "text": "a" * index} for index in range(40)])
        [file] = rollout_files(folder.path)
        content = file.read_bytes()
        file.write_bytes(content[: int(keep * len(content))] + b"junk")
        with pytest.raises(RunError, match=r"step_00000003\.jsonl\.zst is damaged"):
            read_rollouts(file)


@pytest.mark.parametrize("content", ["", "[1]", "a: b: c"])
def test_a_damaged_configuration_is_named(tmp_path, content):
    (tmp_path / "config.yaml").write_text(content)
    with pytest.raises(RunError, match="is not a run's configuration"):
        read_config(tmp_path)


def test_summary_counts_different_tokens_over_all_steps():
    metrics = [
        {"step": 0, "eval/solved": 0.2},
        {"step": 1, "parity/tokens": 100, "parity/tokens_different": 0.01, "parity/k3": 1e-9, "ledger/sampled": 4},
        {"step": 2, "parity/tokens": 300, "parity/tokens_different": 0.0, "parity/k3": 0.0, "eval/solved": 0.5},
    ]
    summary = summarize(metrics, "finished")
    assert summary["parity"] == {"tokens": 400, "tokens_different": 1, "k3_max": 1e-9}
    assert summary["eval/solved"] == {"first": 0.2, "last": 0.5, "best": 0.5}
    assert (summary["status"], summary["step"]) == ("finished", 2)


def test_entropies_of_trained_completions_are_kept_with_three_digits():
    rng = np.random.default_rng(0)
    samples = [make_sample(1, 0, place, 3, rng) for place in range(2)]
    entropies = [np.array([0.0, 1.23456, 1e-5], np.float32)]
    rows = rollout_rows(samples, ["trained", "rejected: no"], [samples[0].completion.logprobs, None], "e", entropies)
    rows = msgspec.json.decode(msgspec.json.encode(rows))
    assert rows[0]["entropies"] == [0, 1.23, 1e-5]
    assert "entropies" not in rows[1]  # nothing recomputed what is not trained
