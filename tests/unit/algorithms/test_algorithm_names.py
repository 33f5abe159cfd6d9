"""Names, arguments and their refusals; the config group."""

import inspect
import math
import subprocess
import sys
from dataclasses import replace

import pytest
from omegaconf import OmegaConf

import rlloop.algorithms
from rlloop.algorithms import advantages_for, get_advantage, get_correction, get_loss, loss_for
from rlloop.algorithms.advantages import ADVANTAGES
from rlloop.algorithms.corrections import CORRECTIONS
from rlloop.algorithms.losses import LOSSES
from rlloop.algorithms.presets import PRESETS
from rlloop.config.algorithm import AlgorithmConfig, Anchor
from rlloop.errors import ConfigError
from tests.support.loss_batches import WHOLE_STEP, random_batch

TOKENWISE = [name for name, each in PRESETS.items() if each.loss not in WHOLE_STEP]  # others: test_preferences.py


def preset(name: str, *overrides: str, max_tokens: int = 100) -> AlgorithmConfig:
    """As Hydra composes it: a structured node under a root, with overrides."""
    root = OmegaConf.create({"rollout": {"max_tokens": max_tokens}, "algorithm": OmegaConf.structured(PRESETS[name])})
    root = OmegaConf.merge(root, OmegaConf.from_dotlist(list(overrides)))
    config = OmegaConf.to_object(root)["algorithm"]
    assert isinstance(config, AlgorithmConfig)
    return config


def test_usual_names_import():
    from rlloop.algorithms import cispo, dapo, grpo, gspo

    assert [f.__name__ for f in (grpo, dapo, gspo, cispo)] == ["grpo", "dapo", "gspo", "cispo"]
    assert all(getattr(rlloop.algorithms, name) for name in rlloop.algorithms.__all__)
    assert {*LOSSES, *ADVANTAGES, *CORRECTIONS} <= set(rlloop.algorithms.__all__)
    with pytest.raises(AttributeError, match="no attribute 'gpro'"):
        rlloop.algorithms.gpro  # noqa: B018


def test_presets_import_no_torch():
    code = "import sys, rlloop.algorithms.presets; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_arguments_reach_the_loss():
    batch = random_batch()
    assert get_loss("dapo")(batch).loss.item() != get_loss("dapo", clip_high=0.01)(batch).loss.item()
    assert get_advantage("group_norm", eps=1.0)([1.0, -1.0], [0, 0])[0] == pytest.approx(1 / (2**0.5 + 1))


@pytest.mark.parametrize(
    ("get", "name", "args", "message"),
    [
        (get_loss, "gpro", {}, "no loss 'gpro'; there are grpo, dr_grpo, dapo"),
        (get_loss, "mine.loss", {}, r"bradley_terry. A dotted path is the value of algorithm.loss._target_"),
        (get_advantage, "std", {}, "no advantage 'std'; there are group_norm, group_mean"),
        (get_loss, "grpo", {"clip": 0.2}, "loss grpo has no argument 'clip'; it has clip_low, clip_high"),
        (get_loss, "grpo", {"clip_hgih": 0.2}, "kl, entropy_coef (did you mean clip_high"),
        (get_loss, "sft", {"kl_coef": 0.2}, "loss sft has no argument 'kl_coef'; it has none"),
        (get_loss, "grpo", {"clip_low": -0.2}, "clip_low is -0.2; it must be a number from 0 to 1"),
        (get_loss, "grpo", {"clip_low": "0.2"}, "clip_low is '0.2'; it must be a number"),
        (get_loss, "grpo", {"clip_low": True}, "clip_low is True"),
        (get_loss, "grpo", {"clip_high": float("nan")}, "clip_high is nan"),
        (get_loss, "grpo", {"kl": "k4"}, "kl is 'k4'; it must be one of k1, k2, k3"),
        (get_loss, "dapo", {"dual_clip": 0.5}, "dual_clip is 0.5; it must be a number above 1, or null"),
        (get_loss, "dr_grpo", {"max_tokens": 2.5}, "max_tokens is 2.5; it must be a whole number"),
        (get_loss, "dr_grpo", {"max_tokens": 0}, "max_tokens is 0"),
        (get_loss, "dro", {"level": "geometric"}, "level is 'geometric'; it must be one of sequence, token"),
        (get_advantage, "group_norm", {"eps": -1}, "eps is -1"),
        (get_loss, "grpo", {"entropy_coef": math.inf}, "entropy_coef is inf; it must be a number 0 or more"),
        (get_advantage, "group_mean", {"eps": 0.1}, "advantage group_mean has no argument 'eps'; it has none"),
    ],
)
def test_what_cannot_work_is_refused_by_name(get, name, args, message):
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        get(name, **args)


@pytest.mark.parametrize(
    ("corrections", "message"),
    [
        ({"tiss": {}}, "no correction 'tiss'; there are tis, clip, mis"),
        ({"tis": {"caps": 2}}, "correction tis has no argument 'caps'; it has level, cap"),
        ({"tis": {"cap": 0}}, "cap is 0; it must be a number above 0"),
        ({"mask": {"low": 2.0, "high": 1.0}}, r"low \(2.0\) must be below high \(1.0\)"),
        ({"mask": {"low": 1.0, "high": 1.0}}, r"low \(1.0\) must be below high \(1.0\)"),
        ({"icepop": {"low": 7.0}}, r"low \(7.0\) must be below high \(5.0\)"),
        ({"tis": {}, "icepop": {}}, "tis and icepop both weigh tokens"),
        ({"tis": 3}, "correction tis is 3; it must be a mapping of its arguments"),
        ({}, "no correction is named"),
    ],
)
def test_corrections_that_cannot_work_are_refused(corrections, message):
    with pytest.raises(ConfigError, match=message):
        get_correction(corrections)


def test_a_correction_without_arguments_may_be_null():
    batch = random_batch().unmasked()
    assert get_correction({"icepop": None})(batch).weights.equal(get_correction({"icepop": {}})(batch).weights)


def test_a_dual_clip_of_none_is_allowed():
    get_loss("dapo", dual_clip=None)
    get_loss("dapo", dual_clip=3)


@pytest.mark.parametrize("name", TOKENWISE)
def test_presets_are_the_documented_defaults(name):
    config = preset(name)
    for kind, registry in (("loss", LOSSES), ("advantage", ADVANTAGES)):
        function, args = registry[getattr(config, kind)], getattr(config, f"{kind}_args")
        parameters = inspect.signature(function).parameters.values()
        defaults = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
        if name == "dr_grpo" and kind == "loss":
            assert args.pop("max_tokens") == 100  # rollout.max_tokens
            del defaults["max_tokens"]
        assert args == defaults
    batch = random_batch()
    loss_for(config)(batch).loss.backward()
    assert batch.logprobs.grad is not None
    assert batch.logprobs.grad.any()


@pytest.mark.parametrize("name", TOKENWISE)
def test_presets_compute_what_their_functions_compute_by_default(name):
    config = preset(name, max_tokens=1)
    bare = replace(config, loss_args={}, advantage_args={})
    batch = random_batch(drift=2.0)  # ratios beyond every bound
    assert loss_for(config)(batch) == loss_for(bare)(batch)
    step = [3e-6, 1e-6, 2e-6, 2e-6], [0, 0, 1, 1], [1, 1, 1, 1], None  # rewards that differ by no more than eps
    both = [advantages_for(each, max_tokens=1, group_size=2)(*step) for each in (config, bare)]
    assert both[0] == both[1]


@pytest.mark.parametrize("name", TOKENWISE)
def test_what_updates_have_moved_out_of_a_truncated_distribution_leaves_the_step_whole(name):
    """Of the second minibatch, say: the token had a logprob when it was sampled and has none now."""
    batch = random_batch()
    now = batch.logprobs.detach().clone()
    moved = int(batch.mask.nonzero()[0])
    now[moved] = -math.inf
    batch = replace(batch, logprobs=now.requires_grad_())
    output = loss_for(preset(name))(batch)
    output.loss.backward()
    assert output.loss.isfinite()
    assert batch.logprobs.grad is not None
    assert batch.logprobs.grad.isfinite().all()
    assert batch.logprobs.grad[moved] == 0
    assert output.metrics["loss/tokens_discarded"].value > 0


def test_presets_cover_every_loss():
    assert {preset.loss for preset in PRESETS.values()} == set(LOSSES)


def test_configured_correction():
    batch = random_batch()
    config = preset("grpo", "algorithm.correction.icepop.low=0.9", "algorithm.correction.veto={}")
    metrics = loss_for(config)(batch).metrics
    assert {"is/masked", "is/ess", "is/ratio_mean"} <= metrics.keys()
    assert (
        metrics["is/masked"].value
        > loss_for(preset("grpo", "algorithm.correction.icepop={}"))(batch).metrics["is/masked"].value
    )


def test_ratio_statistics_need_the_trainers_logprobs():
    batch = random_batch()
    assert "is/ess" in loss_for(preset("grpo"))(batch).metrics
    assert "is/ess" not in loss_for(preset("grpo", "algorithm.anchor=rollout"))(batch).metrics


def test_a_correction_anchored_at_the_rollout_is_refused():
    config = AlgorithmConfig(loss="grpo", advantage="group_norm", anchor=Anchor.rollout, correction={"tis": {}})
    with pytest.raises(ConfigError, match=r"algorithm\.anchor=trainer"):
        loss_for(config)


def test_weighing_an_importance_sampled_loss_is_refused():
    config = AlgorithmConfig(loss="importance_sampling", advantage="group_norm", correction={"tis": {}})
    with pytest.raises(ConfigError, match="already weighs by the ratio"):
        loss_for(config)
    loss_for(AlgorithmConfig(loss="importance_sampling", advantage="group_norm", correction={"veto": {}}))


def test_from_rewards_to_advantages():
    """Dynamic sampling looks at rewards before the length penalty, advantages after it."""
    config = preset("dapo", "algorithm.overlong_buffer=50", "algorithm.advantage=group_mean")
    config.advantage_args = {}
    estimate = advantages_for(config, max_tokens=100, group_size=2)
    advantages, keep = estimate([1.0, 1.0, 1.0, 0.0], [0, 0, 1, 1], [10, 100, 75, 20])
    assert keep == [False, False, True, True]
    assert advantages == [0.5, -0.5, 0.25, -0.25]  # rewards 1, 0, 0.5, 0

    plain = advantages_for(preset("dr_grpo"), max_tokens=100, group_size=2)
    advantages, keep = plain([1.0, 1.0, 1.0, 0.0], [0, 0, 1, 1], [10, 100, 75, 20])
    assert all(keep)
    assert advantages == [0.0, 0.0, 0.5, -0.5]


def test_divergence_from_the_reference_is_taken_from_the_reward():
    estimate = advantages_for(preset("dr_grpo", "algorithm.reward_kl_coef=0.5"), max_tokens=100, group_size=2)
    advantages, keep = estimate([1.0, 1.0], [0, 0], [10, 10], [2.0, 0.0])
    assert advantages == [-0.5, 0.5]  # rewards 0 and 1
    assert keep == [True, True]
    assert all(isinstance(kept, bool) for kept in keep)


def test_arguments_reach_the_configured_loss_and_estimator():
    batch = random_batch()
    tight = preset("grpo", "algorithm.loss_args.clip_high=0.01")
    assert loss_for(tight)(batch).loss.item() == get_loss("grpo", clip_high=0.01)(batch).loss.item()
    assert loss_for(tight)(batch).loss.item() != get_loss("grpo")(batch).loss.item()
    config = preset("grpo", "algorithm.advantage_args.eps=1.0")
    advantages, _ = advantages_for(config, max_tokens=100, group_size=2)([1, -1], [0, 0], [1, 1], None)
    assert advantages[0] == pytest.approx(1 / (2**0.5 + 1))


def test_an_overlong_buffer_beyond_the_budget_is_refused_before_any_work():
    with pytest.raises(ConfigError, match="overlong buffer is 500"):
        advantages_for(preset("grpo", "algorithm.overlong_buffer=500"), max_tokens=100, group_size=2)


@pytest.mark.parametrize("name", ["grpo", "dapo", "rloo"])
def test_a_group_of_one_is_refused_where_samples_are_compared(name):
    with pytest.raises(ConfigError, match="compares samples of one prompt"):
        advantages_for(preset(name), max_tokens=100, group_size=1)
    advantages_for(preset("reinforce_pp"), max_tokens=100, group_size=1)


def test_dynamic_sampling_of_groups_of_one_is_refused():
    with pytest.raises(ConfigError, match="nothing would be left"):
        advantages_for(preset("ppo", "algorithm.dynamic_sampling=true"), max_tokens=100, group_size=1)


OWN = """
import torch
from rlloop.algorithms import LossBatch, LossOutput, PolicyTerm, finish, token_mean, whole_step
from rlloop.algorithms.corrections import Weights

def loss(batch: LossBatch, *, power: float = 1.0) -> LossOutput:
    b = batch.unmasked()
    return finish(b, PolicyTerm(-b.advantages * b.logprobs * power, {}), token_mean(b))

def half(batch: LossBatch, *, factor: float = 0.5) -> Weights:
    return Weights(torch.full_like(batch.logprobs, factor).detach(), {})

def doubled(rewards, groups, *, scale: float = 2.0):
    return rewards * scale

def total(rewards, groups):
    return rewards.sum()

def undefined(rewards, groups):
    return rewards * float("nan")

def bare(batch):
    return batch.logprobs.sum()

@whole_step
def together(batch, entropy_coef=0.0):
    return finish(batch.unmasked(), PolicyTerm(-batch.logprobs, {}), token_mean(batch), entropy_coef=entropy_coef)
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "own_algorithm.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("own_algorithm", None)


def target(name: str, **arguments) -> dict:
    return {"_target_": f"own_algorithm.{name}", **arguments}


@pytest.mark.usefixtures("own")
def test_a_loss_of_ones_own_trains_with_its_arguments_and_a_correction_of_ones_own():
    batch = random_batch()
    single, double = (
        loss_for(AlgorithmConfig(loss=target("loss", power=power), advantage="raw"))(batch) for power in (1.0, 2.0)
    )
    assert double.loss.item() == 2 * single.loss.item() != 0
    assert "is/ess" in single.metrics
    correction = {"mine": target("half", factor=0.25), "veto": {}}
    weighed = loss_for(AlgorithmConfig(loss=target("loss"), advantage="raw", correction=correction))(batch)
    assert weighed.loss.item() == single.loss.item() / 4
    with pytest.raises(ConfigError, match=r"own_algorithm\.bare returned a Tensor; a loss returns a LossOutput"):
        loss_for(AlgorithmConfig(loss=target("bare"), advantage="raw"))(batch)


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize("arguments", [{}, {"entropy_coef": 0.0}, {"entropy_coef": 0.5}])
def test_a_loss_of_ones_own_is_as_marked(arguments):
    loss = loss_for(AlgorithmConfig(loss=target("together", **arguments), advantage="raw"))
    assert vars(loss) == {"whole_step": True} | ({"entropy_term": True} if arguments.get("entropy_coef") else {})
    with pytest.raises(ConfigError, match="compares whole sequences"):
        loss_for(AlgorithmConfig(loss=target("together"), advantage="raw", correction={"tis": {}}))


@pytest.mark.usefixtures("own")
def test_an_estimator_of_ones_own():
    def estimate(name: str, **arguments):
        config = AlgorithmConfig(loss="grpo", advantage=target(name, **arguments))
        return advantages_for(config, max_tokens=100, group_size=1)([1.0, 3.0], [0, 0], [1, 1])

    assert estimate("doubled") == ([2.0, 6.0], [True, True])
    assert estimate("doubled", scale=0.5) == ([0.5, 1.5], [True, True])
    for name in ("total", "undefined"):
        with pytest.raises(ConfigError, match=r"for 2 rewards; it must be an array of as many finite numbers"):
            estimate(name)


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize(
    ("config", "says"),
    [
        (
            {"loss": target("loss", pwer=2.0), "advantage": "raw"},
            "algorithm.loss.pwer is no argument of own_algorithm.loss",
        ),
        (
            {"loss": target("loss", power="2"), "advantage": "raw"},
            "algorithm.loss.power is '2'; own_algorithm.loss takes",
        ),
        ({"loss": "grpo", "advantage": target("double")}, "own_algorithm has no 'double' (did you mean doubled?)"),
        ({"loss": "grpo", "advantage": target("loss")}, "algorithm.advantage._target_: own_algorithm.loss"),
        (
            {"loss": "grpo", "advantage": "raw", "correction": {"mine": target("half", facor=1.0)}},
            "algorithm.correction.mine.facor is no argument of own_algorithm.half; allowed are factor",
        ),
    ],
)
def test_arguments_of_ones_own_are_refused_by_name_before_any_work(config, says):
    def build(algorithm: AlgorithmConfig):
        return loss_for(algorithm), advantages_for(algorithm, max_tokens=100, group_size=2)

    with pytest.raises(ConfigError) as caught:
        build(AlgorithmConfig(**config))
    assert says in str(caught.value)
