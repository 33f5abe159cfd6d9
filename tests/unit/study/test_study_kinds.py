import pytest

from rlloop.launch.compose import build, compose_recipe
from rlloop.study.analysis import band


def test_a_kind_is_what_the_arms_engines_have_for_weights(module):
    kinds, study = module("study_kinds"), module("gpu_study")
    arms = kinds.arms_of(kinds.FOLDER / "gpu_evaluations.json")
    same, rounded = map(set, kinds.KINDS.values())
    assert same & rounded == {"zero_kld"}
    assert same | rounded == set(arms["dense"]) | set(arms["experts"])
    for model, found in arms.items():
        for name in found:
            drift = build(compose_recipe(study.RECIPES[model], study.ARMS[model][name])).rollout.drift
            assert (name in same) == (drift.weights == "none" or drift.both_sides or name == "zero_kld")


def test_the_picture_has_what_all_seeds_reached(module):
    kinds = module("study_kinds")
    arms = kinds.arms_of(kinds.FOLDER / "gpu_evaluations.json")
    stopped, collapsed = (band(arm, kinds.METRIC) for arm in (arms["experts"]["other_kernels"], arms["dense"]["fp4"]))
    assert stopped is not None
    assert collapsed is not None
    assert stopped.steps[-1] == 130
    assert (collapsed.mean[0], collapsed.high[-1]) == (pytest.approx(0.217, abs=1e-3), 0.0)
    assert kinds.draw(arms).startswith(b"\x89PNG")
