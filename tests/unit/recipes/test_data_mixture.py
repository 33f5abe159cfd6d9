"""The order of training rows: epochs, weights and curricula, each a function of seed and step."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest

from rlloop.errors import ConfigError
from rlloop.recipes.custom.data import parse_line
from rlloop.recipes.custom.mixture import Curriculum, Mixture, Source, weights_of
from rlloop.recipes.custom.streaming import JsonLines
from rlloop.recipes.custom.task import Custom
from rlloop.recipes.custom.tiny import write_tiny


def counts(mixture: Mixture, steps: range, count: int) -> Counter:
    return Counter(source for step in steps for source, _ in mixture.draw(step, count))


def test_one_source_gives_each_row_once_an_epoch_as_it_always_did():
    mixture = Mixture(3, [Source("", 10)])
    drawn = [row for step in range(1, 6) for _, row in mixture.draw(step, 4)]
    epochs = [np.random.default_rng((3, epoch)).permutation(10).tolist() for epoch in (0, 1)]
    assert drawn == epochs[0] + epochs[1]


def test_weights_hold_over_the_steps_however_small_the_steps_are():
    sources = [Source("a", 7, [(0, 97.0)]), Source("b", 5, [(0, 3.0)]), Source("c", 5, [(0, 0.0)])]
    mixture = Mixture(0, sources)
    assert counts(mixture, range(1, 101), 8) == {0: 776, 1: 24}
    for step in range(1, 101):
        assert len(mixture.draw(step, 8)) == 8
    # within a source, each row once an epoch
    rows = [row for step in range(1, 101) for source, row in mixture.draw(step, 8) if source == 1]
    assert all(sorted(Counter(rows[at : at + 5])) == [0, 1, 2, 3, 4] for at in range(0, 20, 5))


def test_weights_move_with_the_steps():
    mixture = Mixture(0, [Source("a", 9, [(0, 1.0), (10, 0.0)]), Source("b", 9, [(0, 0.0), (10, 1.0)])])
    assert counts(mixture, range(1, 2), 10) == {0: 9, 1: 1}
    assert counts(mixture, range(10, 12), 10) == {1: 20}


@pytest.mark.parametrize("first", [1, 7, 40])
def test_any_step_can_be_drawn_first(first):
    def sources():
        curriculum = Curriculum("level", 20, 0.2)
        return [Source("a", 30, [(0, 2.0)], curriculum, np.arange(30)), Source("b", 11, [(0, 1.0), (50, 3.0)])]

    whole, resumed = Mixture(5, sources()), Mixture(5, sources())
    history = {step: whole.draw(step, 6) for step in range(1, 46)}
    assert [resumed.draw(step, 6) for step in range(first, 46)] == [history[step] for step in range(first, 46)]


def test_a_curriculum_opens_from_the_easiest_on():
    curriculum = Curriculum("level", steps=10, start=0.1)
    assert [curriculum.open(step, 100) for step in (1, 6, 11, 50)] == [10, 55, 100, 100]
    hardest_first = np.arange(100)[::-1]
    mixture = Mixture(0, [Source("", 100, curriculum=curriculum, by_difficulty=hardest_first)])
    assert min(row for _, row in mixture.draw(1, 50)) >= 90
    assert min(row for _, row in mixture.draw(11, 200)) < 20


@pytest.mark.parametrize("weight", ["much", -1, [[5, 1], [5, 2]], [], [[0, 1], [3, -1]]])
def test_weights_that_are_none_are_named(weight):
    with pytest.raises(ConfigError, match=r"data.mix.a.weight is"):
        weights_of("a", weight)
    with pytest.raises(ConfigError, match=r"all weights are 0 at step 4"):
        Mixture(0, [Source("a", 1, [(0, 1.0), (4, 0.0)])])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("mixture")
    write_tiny(path / "model", hidden_size=16, num_layers=1)
    for name in ("easy", "hard"):
        (path / name).mkdir()
        for shard in range(2):
            rows = [{"prompt": f"{name} {shard} {n}", "level": n} for n in range(30)]
            (path / name / f"{shard}.jsonl").write_text("\n\n".join(map(json.dumps, rows)) + "\n")
        texts = [(path / name / f"{shard}.jsonl").read_text() for shard in range(2)]
        (path / f"{name}.jsonl").write_text("".join(texts))
    return path


def task(folder, **data) -> Custom:
    return Custom(0, str(folder / "model"), data=data, max_tokens=8, max_sequence_tokens=128)


def test_streamed_rows_are_the_same_in_shards_as_in_memory(folder):
    whole = task(folder, path=str(folder / "easy.jsonl"))
    for path in (folder / "easy.jsonl", folder / "easy"):
        streamed = task(folder, path=str(path), streaming=True)
        assert [streamed.train_examples(step, 7) for step in range(1, 12)] == [
            whole.train_examples(step, 7) for step in range(1, 12)
        ]
        assert streamed.eval_examples(9) == whole.eval_examples(9)
    lines = JsonLines(folder / "easy", "data.path")
    assert len(lines) == 60
    assert lines[31][1] == parse_line((folder / "easy/1.jsonl").read_bytes().splitlines()[2], folder, 3)
    assert lines[31][0] == 3  # numbers count lines, blank ones too


def test_sources_are_mixed_and_named(folder):
    mix = {
        "easy": {"path": str(folder / "easy.jsonl"), "weight": 3, "curriculum": {"key": "level", "steps": 50}},
        "hard": {"path": str(folder / "hard.jsonl")},
    }
    made = task(folder, path=None, mix=mix)
    drawn = made.train_examples(1, 16)
    assert Counter(example.id.split("/")[0] for example in drawn) == {"easy": 12, "hard": 4}
    assert max(example.data["level"] for example in drawn if example.id.startswith("easy")) <= 3
    assert [example.id.split("/")[0] for example in made.eval_examples(4)] == ["easy", "hard"] * 2
    with pytest.raises(ConfigError, match=r"data.path is .* beside data.mix"):
        task(folder, path="x", mix=mix)
    with pytest.raises(ConfigError, match=r"data.mix.easy is .* it must be a mapping with a path"):
        task(folder, path=None, mix={"easy": "easy.jsonl"})
    with pytest.raises(ConfigError, match=r"60 of 60 rows|have no number under 'depth'"):
        task(folder, path=str(folder / "easy.jsonl"), curriculum={"key": "depth", "steps": 5})


def test_all_problems_of_the_rows_are_listed(folder, tmp_path):
    rows = [{"prompt": "fine"}] * 20 + [{"prompt": ""}, {"prompt": 7}, {"prompt": "x" * 300}, {"prompt": ""}]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for streaming in (False, True):
        with pytest.raises(ConfigError) as error:
            task(folder, path=str(file), eval_path=str(folder / "easy.jsonl"), streaming=streaming)
        first, *rest = str(error.value).splitlines()
        assert first == f"{file}, row 21: prompt is empty"
        assert rest == [
            "4 of 24 rows cannot be used:",
            "  empty prompt: 2 (row 21, 24)",
            "  prompt that is neither text nor messages: 1 (row 22)",
            "  too long: 1 (row 23)",
        ]
