"""`_target_`: what it names, what its arguments may be, and what is said where they do not fit."""

from __future__ import annotations

import sys
from typing import Any, Literal, Protocol

import pytest

from rlloop.config.instantiate import accepts, bind, lacking, resolve
from rlloop.errors import ConfigError

MINE = """
from typing import Literal

number = 3

def reward(prompt, completion, *, weight: float = 1.0, mode: Literal["sum", "mean"] = "sum", note: str = None):
    return (prompt, completion, weight, mode)

class Counter:
    def __init__(self, start: int = 0) -> None:
        self.start = start

    def __call__(self, batch):
        return self.start + batch

def make(model, *, page_size, own: int = 1, **settings):
    return (model, page_size, own, settings)

def narrow(model, page_size):
    return model
"""


@pytest.fixture(autouse=True)
def mine(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.syspath_prepend(tmp_path)


def test_a_function_is_bound_and_a_class_instantiated():
    assert resolve({"_target_": "mine.reward", "weight": 2}, "reward", ("p", "c"))("a", "b") == ("a", "b", 2, "sum")
    assert resolve({"_target_": "mine.Counter", "start": 5}, "algorithm.loss", ("batch",))(1) == 6


def test_a_bound_class_is_not_called_yet():
    assert bind({"_target_": "mine.Counter"}, "rollout.engine", ("start",))(7).start == 7
    make = bind({"_target_": "mine.make", "own": 3}, "rollout.engine", ("model",), ("page_size", "prefix_caching"))
    assert make("m", page_size=16, prefix_caching=True) == ("m", 16, 3, {"prefix_caching": True})


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (
            {"_target_": "mine.reward", "wieght": 1},
            "section.wieght is no argument of mine.reward; allowed are weight, mode",
        ),
        ({"_target_": "mine.reward", "weight": "x"}, "section.weight is 'x'; mine.reward takes float"),
        ({"_target_": "mine.reward", "weight": True}, "section.weight is True"),
        ({"_target_": "mine.reward", "mode": "max"}, "mine.reward takes Literal['sum', 'mean']"),
        ({"_target_": "mine.number"}, "is a int, not a function or class"),
        ({"_target_": "mine.rewrad"}, "mine has no 'rewrad' (did you mean reward?)"),
        ({"_target_": "nowhere.reward"}, "there is no module 'nowhere'"),
        ({}, "section._target_ is None"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(config, says):
    for call in (resolve, bind):
        with pytest.raises(ConfigError) as caught:
            call(config, "section", ("prompt", "completion"))
        assert says in str(caught.value)


@pytest.mark.parametrize(
    ("target", "own", "says"),
    [
        (
            "narrow",
            {},
            "cannot be called with (model, page_size=..., cache=...): got an unexpected keyword argument 'cache'",
        ),
        ("make", {"page_size": 3}, "section.page_size is no argument of mine.make; allowed are own"),
        ("make", {"onw": 3}, "section.onw is no argument of mine.make; allowed are own"),
        ("make", {"own": 1.5}, "section.own is 1.5; mine.make takes int"),
    ],
)
def test_settings_that_rlloop_passes_must_be_taken_and_are_its_own(target, own, says):
    with pytest.raises(ConfigError) as caught:
        bind({"_target_": f"mine.{target}", **own}, "section", ("model",), ("page_size", "cache"))
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("target", "own", "installed", "refused"),
    [
        ("grading.score", "grading.py", "grading.py", True),
        ("grading.score", "grading/__init__.py", "grading.py", True),
        ("grading.letters.score", "grading/letters.py", "grading/__init__.py", True),  # a package goes before a folder
        ("calendar.score", "calendar.py", None, True),  # Python's own
        ("grading.score", "grading.py", None, False),
        ("grading.score", None, "grading.py", False),
        ("grading.letters.score", "grading/notes.txt", "grading/letters.py", False),
    ],
)
def test_a_module_that_an_installed_one_hides_is_refused(target, own, installed, refused, tmp_path, monkeypatch):
    for folder, file in (("here", own), ("site", installed)):
        (tmp_path / folder).mkdir()
        if file is not None:
            (tmp_path / folder / file).parent.mkdir(exist_ok=True)
            (tmp_path / folder / file).write_text(f"def score(prompt):\n    return {folder!r}\n")
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site"), *sys.path, str(tmp_path / "here")])
    config = {"_target_": target}
    if refused:
        with pytest.raises(ConfigError, match=f"the working folder has {own}, but Python imports .* another name"):
            resolve(config, "reward", ("prompt",))
    else:
        assert resolve(config, "reward", ("prompt",))("x") == ("here" if installed is None else "site")
    monkeypatch.syspath_prepend(tmp_path / "here")  # as `python -m` has it, which a package still goes before
    sys.modules.pop("grading", None)
    if own == "grading.py":
        assert resolve(config, "reward", ("prompt",))("x") == "here"


def test_a_default_is_an_allowed_value_whatever_its_annotation():
    resolve({"_target_": "mine.reward", "note": None}, "reward", ("p", "c"))


@pytest.mark.parametrize(
    ("hint", "good", "bad"),
    [
        (float, [1, 1.5, -0.0], [True, "1", None]),
        (int, [0, -3], [1.0, True]),
        (int | None, [None, 2], ["2", False]),
        (bool, [True], [1]),
        (Literal["a", "b"] | None, ["a", None], ["c"]),
        (dict[str, int], ["anything", 3], []),
        (Any, [object()], []),
    ],
)
def test_accepts(hint, good, bad):
    assert all(accepts(hint, value) for value in good)
    assert not any(accepts(hint, value) for value in bad)


def test_lacking_names_members_of_a_protocol_and_of_those_it_extends():
    class Base(Protocol):
        @property
        def version(self) -> int: ...

    class Wider(Base, Protocol):
        def close(self) -> None: ...

    class Half:
        version = 3

    assert lacking(Wider, Half()) == ["close"]
    assert lacking(Wider, object()) == ["close", "version"]
    assert lacking(Base, Half()) == []
