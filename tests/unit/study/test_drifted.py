from itertools import pairwise

import torch

from rlloop.study.quantize import quantized
from rlloop.types import SamplingParams
from tests.support.drifted_pair import EMBEDDING, LINEAR, NORM, Pair


def test_linear_weights_are_rounded_anew_at_each_version_and_the_rest_is_kept():
    pair = Pair(weights="int4")
    for version in range(3):
        metrics = pair.sync.publish(version)
        assert torch.equal(pair.served(LINEAR), quantized(pair.weight(LINEAR), "int4"))
        for name in (EMBEDDING, NORM):
            assert torch.equal(pair.served(name), pair.weight(name))
        assert 0 < metrics["sync/weight_error"] < 0.5
        assert (pair.engine.policy_version, pair.twin.policy_version) == (version, version)
        assert pair.differs()
        pair.train()


def test_narrower_weights_are_larger_doses():
    doses = []
    for kind in ("int8", "int6", "int5", "int4"):
        pair = Pair(weights=kind)
        doses.append(pair.sync.publish(0)["sync/weight_error"])
        assert torch.equal(pair.served(LINEAR), quantized(pair.weight(LINEAR), kind))
    assert all(1.8 < more / less < 4.5 for less, more in pairwise(doses))


def test_a_bf16_engine_rounds_every_weight():
    pair = Pair(weights="bf16", activations="bf16")
    pair.sync.publish(0)
    for name in (LINEAR, EMBEDDING, NORM):
        assert torch.equal(pair.served(name), pair.weight(name).bfloat16().float())
    assert pair.differs()


def test_the_trainers_weights_stay_its_own():
    pair = Pair(weights="int4")
    before = pair.weight(LINEAR).clone()
    pair.sync.publish(0)
    assert torch.equal(pair.weight(LINEAR), before)


def test_before_its_first_step_there_is_no_drift_and_then_there_is():
    pair = Pair(weights="fp4", granularity="block", logits="bfloat16", from_step=3)
    for version in range(4):  # version 2 samples step 3
        error = pair.sync.publish(version)["sync/weight_error"]
        assert (error > 0, pair.differs()) == (version >= 2, version >= 2)
        pair.train()


def test_the_declaration_stands_in_the_fingerprint_from_the_beginning():
    pair = Pair(weights="int4", from_step=3)
    before = pair.engine.fingerprint()
    for version in range(4):
        pair.sync.publish(version)
    assert pair.engine.fingerprint() == before != pair.model.fingerprint()
    assert before["profile"]["drift"] == {
        "weights": "int4", "granularity": "channel", "activations": "none", "products": "none", "cache": "none",
        "logits": "float32", "stale_steps": 0, "lossy_sync": False, "from_step": 3, "both_sides": False,
    }  # fmt: skip


def test_stale_weights_are_those_of_their_version():
    pair = Pair(stale_steps=2)
    history = []
    for version in range(5):
        history.append(pair.weight(LINEAR).clone())
        pair.sync.publish(version)
        held = max(0, version - 2)
        assert pair.engine.policy_version == held
        assert pair.twin.policy_version == version
        assert torch.equal(pair.served(LINEAR), history[held])
        [made] = pair.engine.generate([[1, 2]], SamplingParams(2, seed=0))
        assert made.policy_version == held
        pair.train()


def test_lossy_sync_loses_updates_below_half_of_the_last_place_for_good():
    pair = Pair(lossy_sync=True)
    with torch.no_grad():
        for weight in pair.model.parameters():
            weight.fill_(1.0)
    pair.sync.publish(0)
    for version in range(1, 11):
        pair.train(by=2**-9)  # bfloat16 near 1 has steps of 2**-7, so half of one is 2**-8
        pair.sync.publish(version)
    assert pair.served(LINEAR).unique().tolist() == [1.0]
    assert pair.weight(LINEAR).unique().tolist() == [1.0 + 10 * 2**-9]
    pair.train(by=2**-7)
    pair.sync.publish(11)
    assert pair.served(LINEAR).unique().tolist() == [1.0 + 2**-7]  # the one that is large enough arrives alone


def test_a_version_published_twice_changes_nothing():
    for drift in ({"lossy_sync": True}, {"stale_steps": 2}, {"weights": "int4"}):
        pair = Pair(**drift)
        for version in range(3):
            pair.sync.publish(version)
            pair.train()
        held, version = pair.served(LINEAR).clone(), pair.engine.policy_version
        pair.train(by=-0.01)
        pair.sync.publish(2)
        assert torch.equal(pair.served(LINEAR), held)
        assert pair.engine.policy_version == version


def test_a_restored_sync_goes_on_like_the_one_that_was_saved(tmp_path):
    for name, drift in (("lossy", {"lossy_sync": True}), ("stale", {"stale_steps": 2})):
        first, second = Pair(**drift), Pair(**drift)
        for version in range(4):
            first.sync.publish(version)
            first.train(by=0.001)
        folder = tmp_path / name
        folder.mkdir()
        first.sync.save(folder)
        second.sync.restore(folder)
        second.model.load_state_dict(first.model.state_dict())
        for version in (4, 5, 6):
            for pair in (first, second):
                pair.sync.publish(version)
                pair.train(by=0.001)
            assert torch.equal(first.served(LINEAR), second.served(LINEAR))
            assert first.engine.policy_version == second.engine.policy_version
