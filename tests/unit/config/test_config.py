import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf

from rlloop import recipes
from rlloop.config.numerics import DriftConfig, ProfileConfig, RolloutProfile
from rlloop.config.resume import refuse_other_run
from rlloop.config.run import AlgorithmConfig, ParityMode, RunConfig
from rlloop.config.trainer import TrainerConfig
from rlloop.errors import ConfigError, RunError
from rlloop.launch.compose import as_container, build, compose_recipe, expand_sweep
from rlloop.numerics.profile import SETTINGS, Drift, NumericsProfile

RECIPE = """\
defaults:
  - rlloop
  - algorithm: grpo
  - _self_
task: {_target_: rlloop.testing.FakeTask}
reward: {_target_: rlloop.testing.fake_reward}
trainer: {num_steps: 5}
"""
VARIANT = """\
defaults:
  - config
  - _self_
trainer: {lr: 0.5}
"""


@pytest.fixture(autouse=True)
def working_folder(tmp_path, monkeypatch) -> Path:
    folder = tmp_path / "recipes" / "toy"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(RECIPE)
    (folder / "variant.yaml").write_text(VARIANT)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def configured(*overrides: str, name: str = "toy") -> RunConfig:
    return build(compose_recipe(name, overrides))


def test_a_recipe_and_overrides_become_plain_dataclasses():
    config = configured("trainer.lr=3e-4", "algorithm=dapo", "algorithm.loss_args.clip_high=0.3")
    assert (config.trainer.num_steps, config.trainer.lr, config.trainer.betas) == (5, 3e-4, (0.9, 0.95))
    assert (config.algorithm.loss, config.algorithm.loss_args["clip_high"]) == ("dapo", 0.3)
    assert config.parity.mode is ParityMode.require


def test_a_variant_is_another_file_of_the_recipe():
    assert configured(name="toy/variant").trainer == TrainerConfig(num_steps=5, lr=0.5)


def test_the_working_folder_comes_before_what_ships(working_folder, monkeypatch):
    shipped = working_folder / "shipped"
    for name in ("toy", "other"):
        (shipped / name).mkdir(parents=True)
        (shipped / name / "config.yaml").write_text(RECIPE.replace("num_steps: 5", "num_steps: 77"))
    monkeypatch.setattr(recipes, "SHIPPED", shipped)
    assert configured(name="toy").trainer.num_steps == 5
    assert configured(name="other").trainer.num_steps == 77
    assert list(recipes.available()) == ["other", "toy", "toy/variant"]


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("trainer.lrr=1", "no key trainer.lrr; did you mean trainer.lr"),
        ("lr=1", "no key lr; did you mean trainer.lr or algorithm.critic.lr?"),
        ("layout.tp=2", "no key layout; did you mean trainer.layout.tp or rollout.layout.tp?"),
        (
            "trainer.layout={tp: 2, ppp: 3}",
            "3}': there is no key trainer.layout.ppp; did you mean trainer.layout.pp?",
        ),
        ("rollout.groupsize=4", "did you mean rollout.group_size"),
        ("rewards._target_=x", "no key rewards; did you mean reward?"),
        ("reward.weight=1", "reward is free, so a new one is added by +reward.weight=1"),
        ("algorithm.loss_args.clip_hihg=1", "algorithm.loss_args.clip_high?); algorithm.loss_args is free"),
        ("+algorithm.loss_args.clip_high=1", "+algorithm.loss_args.clip_high=1: Could not append to config"),
        ("algorithm.correction=icepop", "algorithm.correction is a mapping: algorithm.correction='{icepop: {}}'"),
        ("reward=mine.score", "reward is a mapping; give reward._target_=mine.score"),
        ("data=rows", "data is a mapping; set its keys one by one, as in data.KEY=VALUE"),
        ("model.lora.targets=q_proj", "model.lora.targets is a list: 'model.lora.targets=[q_proj]'"),
        ("rollout.drift=int4", "rollout.drift is a section, and its keys are set one by one: rollout.drift.weights, "),
        ("rollout.drift.dtype=1", "did you mean model.dtype? Else there are rollout.drift.weights"),
        ("+trainer.num_step=1", "did you mean trainer.num_steps"),
        ("+qqq=1", "there is no key qqq; there are seed"),
        ("trainer.zzz=1", "there are trainer.num_steps, trainer.lr"),
        ("trainer.lr=fast", "trainer.lr=fast: Value 'fast'"),
        ("trainer.schedule=wavy", "expected one of [constant, linear, cosine]"),
        ("parity.mode=strict", "expected one of [require, fallback, observe]"),
        ("launch=slurm", "expected one of [local, ray]"),
        ("ray.gpus_per_worker=2", "above 0 and at most 1"),
        ("algorithm=grppo", "it must be one of cispo, dapo"),
        ("algorithm=grppo", "did you mean grpo?"),
        ("seed=0,1", "add -m"),
        ("seed", "write key=value"),
        ("=3", "'=3' names no key"),
        ("model.path=~/model", "the shell leaves ~ as it is after =; write model.path=$HOME/model"),
        ("run.dir=runs/größe", "quote its value: 'run.dir=\"runs/größe\"'"),
        ("trainer.lr=null", "'trainer.lr=null': trainer.lr cannot be null"),
        ("hydra.run.dir=x", "has no effect"),
        ("algorithm.loss=???", "algorithm.loss must be given"),
    ],
)
def test_what_does_not_compose_is_refused_by_name_in_a_line(override, says):
    with pytest.raises(ConfigError) as caught:
        configured(override)
    assert says in str(caught.value)
    assert len(str(caught.value).splitlines()) <= 2


def test_of_a_key_given_twice_the_last_value_is_named():
    with pytest.raises(ConfigError, match=r"^trainer.lr=fast: Value 'fast'"):
        configured("trainer.lr=1e-3", "trainer.lr=fast")


def test_which_layers_are_recomputed_is_none_all_or_a_number():
    assert configured().trainer.checkpoint_every == 0
    for given, every in (("none", 0), ("all", 1), ("1", 1), ("3", 3)):
        assert configured(f"trainer.checkpoint_layers={given}").trainer.checkpoint_every == every


@pytest.mark.parametrize(
    ("override", "section", "found"),
    [
        ("algorithm.correction={tis: {cap: 2.0}}", "correction", {"tis": {"cap": 2.0}}),
        ("algorithm.correction={veto: {}, icepop: {low: 0.5, high: 5}}", "correction", None),
        ("algorithm.loss_args={clip_high: 0.3}", "loss_args", None),
    ],
)
def test_braces_bring_keys_of_their_own_where_a_section_is_free(override, section, found):
    given = from_override(override)
    algorithm = vars(configured(override).algorithm)[section]
    assert algorithm.items() >= (found or given["algorithm"][section]).items()
    with pytest.raises(ConfigError, match=r"no key trainer\.lrr"):
        configured("trainer={lrr: 1}")


@pytest.mark.parametrize("key", ["algorithm.loss", "algorithm.advantage", "rollout.engine"])
@pytest.mark.parametrize(
    "spellings",
    [
        ["KEY._target_=mine.thing", "KEY.own=0.3"],
        ["+KEY._target_=mine.thing", "+KEY.own=0.3"],
        ["KEY={_target_: mine.thing, own: 0.3}"],
        ["+KEY={_target_: mine.thing}", "++KEY.own=0.3"],
    ],
)
def test_a_target_takes_the_place_of_a_name_in_every_spelling(key, spellings):
    config = configured(*[text.replace("KEY", key) for text in spellings])
    section, _, name = key.partition(".")
    assert getattr(getattr(config, section), name) == {"_target_": "mine.thing", "own": 0.3}


def test_a_target_in_the_recipe_and_over_it(working_folder):
    file = working_folder / "recipes" / "toy" / "config.yaml"
    file.write_text(RECIPE + "algorithm: {loss: {_target_: mine.loss, own: {deep: 1}}}\n")
    assert configured().algorithm.loss == {"_target_": "mine.loss", "own": {"deep": 1}}
    config = configured("algorithm.loss.own.deep=2", "algorithm.loss.word=", "algorithm.loss.at='${seed}'")
    assert config.algorithm.loss == {"_target_": "mine.loss", "own": {"deep": 2}, "word": "", "at": 0}
    assert configured("algorithm.loss=dapo").algorithm.loss == "dapo"
    assert as_container(compose_recipe("toy", []))["algorithm"]["loss"]["_target_"] == "mine.loss"


def test_a_presets_arguments_do_not_follow_to_a_target_and_ones_own_are_refused():
    assert configured("algorithm=dr_grpo").algorithm.loss_args
    config = configured("algorithm=dr_grpo", "algorithm.loss._target_=mine.loss")
    assert (config.algorithm.loss_args, config.algorithm.advantage) == ({}, "group_mean")
    assert configured("algorithm.advantage._target_=mine.estimator").algorithm.advantage_args == {}
    with pytest.raises(ConfigError, match=r"stand beside its _target_, as in algorithm\.loss\.NAME"):
        configured("algorithm.loss._target_=mine.loss", "algorithm.loss_args.clip_high=0.3")


def test_a_resumed_run_keeps_its_targets_and_their_arguments(tmp_path):
    def composed(*overrides: str) -> dict:
        return as_container(compose_recipe("toy", ["algorithm.loss={_target_: mine.loss, own: 0.3}", *overrides]))

    recorded = composed()
    refuse_other_run(tmp_path, recorded, composed("trainer.num_steps=9"))
    with pytest.raises(RunError, match=r"algorithm\.loss\.own: the run has 0\.3, now it is 0\.5"):
        refuse_other_run(tmp_path, recorded, composed("algorithm.loss.own=0.5"))
    with pytest.raises(RunError, match=r"algorithm\.loss\._target_: the run has 'mine.loss', now it is None"):
        refuse_other_run(tmp_path, recorded, composed("algorithm.loss=grpo"))
    with pytest.raises(RunError, match=r"rollout\.engine: the run has 'embedded', now it is None"):
        refuse_other_run(tmp_path, recorded, composed("rollout.engine._target_=mine.engine"))


def test_a_kl_coef_beside_a_target_asks_for_a_reference():
    assert configured("algorithm.loss={_target_: mine.loss, kl_coef: 0.1}").algorithm.loss_kl_coef == 0.1
    assert configured("algorithm.loss_args.kl_coef=0.2").algorithm.loss_kl_coef == 0.2
    with pytest.raises(ConfigError, match=r"the loss's kl_coef"):
        configured("algorithm.loss={_target_: mine.loss, kl_coef: 0.1}", "rollout.top_k=5")


@pytest.mark.parametrize(
    ("override", "says"),
    [
        (
            "algorithm.loss.clip_high=0.3",
            "no _target_, the dotted path of a function or class; the arguments of a named",
        ),
        ("rollout.engine.page_size=4", "rollout.engine has page_size and no _target_"),
        ("rollout.engine=vlm", "rollout.engine is 'vlm'; it must be embedded, vllm, vllm_stock, or {_target_: package"),
        ("algorithm.loss=3", "algorithm.loss is 3; it must be the name of one in rlloop.algorithms, or {_target_: "),
    ],
)
def test_what_is_neither_a_name_nor_a_target_is_refused(override, says):
    with pytest.raises(ConfigError) as caught:
        configured(override)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("trainer.lr=-1", "trainer.lr is -1.0; it must be 0 or more"),
        ("trainer.lr=nan", "trainer.lr is nan"),
        ("trainer.num_steps=0", "trainer.num_steps is 0; it must be at least 1"),
        (
            "trainer.checkpoint_layers=0",
            "trainer.checkpoint_layers is '0'; it must be none, all, or a whole number n from 1",
        ),
        ("trainer.checkpoint_layers=some", "trainer.checkpoint_layers is 'some'; it must be none, all, or a whole"),
        ("trainer.betas=[0.9]", "trainer.betas is [0.9]; it must be two numbers"),
        ("rollout.num_prompts=0", "rollout.num_prompts is 0; it must be at least 1"),
        ("rollout.min_tokens=300", "from 0 to rollout.max_tokens (256)"),
        ("rollout.temperature=0", "rollout.temperature is 0.0; it must be from 1e-6 to 1e6"),
        ("rollout.temperature=1e-30", "rollout.temperature is 1e-30; it must be from 1e-6 to 1e6"),
        ("rollout.top_k=3000000000", "0 (off) or more, below 2**31"),
        ("eval.temperature=1e30", "0 (greedy), or from 1e-6 to 1e6"),
        ("rollout.top_p=0", "rollout.top_p is 0.0"),
        ("rollout.max_cache_tokens=10", "at least rollout.max_tokens (256)"),
        ("trainer.max_batch_tokens=100", "above rollout.max_tokens (256)"),
        ("trainer.num_minibatches=33", "at most rollout.num_prompts (32)"),
        ("algorithm.max_refills=2", "0 unless algorithm.dynamic_sampling is true"),
        ("algorithm.reward_kl=k4", "one of k1, k2, k3"),
        ("algorithm.reward_kl_coef=-1", "0 (off) or more"),
        ("{algorithm: {reward_kl_coef: 0.1}, rollout: {top_p: 0.9}}", "KL to the reference"),
        ("{algorithm: {loss_args: {kl_coef: 0.1}}, rollout: {top_k: 5}}", "is infinite under rollout.top_p, top_k"),
        ("trainer.lr=${nope}", "trainer.lr: Interpolation key 'nope' not found"),
        ("rollout.profile.linear=stock", "set parity.mode=observe"),
        ("model.profile.linear=stock", "parity.mode=require cannot hold"),
        ("rollout.profile.linear=stok", "null (the model's own), rlloop, stock, huggingface, reference"),
        ("parity.replay=true", "false under parity.mode=require"),
        ("model.dtype=int8", "float32, bfloat16, float16"),
        ("seed=-1", "seed is -1"),
        ("checkpoint.keep=0", "checkpoint.keep is 0; it must be at least 1"),
        ("eval.num_draws=0", "eval.num_draws is 0"),
        ("scoring.timeout=0", "scoring.timeout is 0.0"),
        ("{model: {path: a}, task: {model_path: b}}", "model.path is 'a' and task.model_path 'b'"),
        ("{model: {path: a}, task: {model_path: null}}", "leave task.model_path out"),
    ],
)
def test_values_that_cannot_work_are_refused_by_name(override, says):
    algorithm = OmegaConf.structured(AlgorithmConfig(loss="grpo", advantage="group_norm"))
    composed = OmegaConf.merge(OmegaConf.structured(RunConfig), {"algorithm": algorithm}, from_override(override))
    assert isinstance(composed, DictConfig)
    with pytest.raises(ConfigError) as caught:
        build(composed)
    assert says in str(caught.value)


def test_a_model_that_the_task_names_too_is_one_model():
    assert configured("model.path=a", "+task.model_path=a").model.path == "a"
    assert configured("+task.model_path=a").task["model_path"] == "a"


def from_override(override: str) -> DictConfig:
    return OmegaConf.create(override) if override.startswith("{") else OmegaConf.from_dotlist([override])


def test_a_missing_recipe_lists_what_there_is(working_folder):
    with pytest.raises(ConfigError, match="did you mean toy") as caught:
        configured(name="toyy")
    for part in ("toy/variant", str(working_folder / "recipes")):
        assert part in str(caught.value)


def test_a_mistake_in_the_recipe_itself_names_its_file(working_folder):
    file = working_folder / "recipes" / "toy" / "config.yaml"
    file.write_text(RECIPE + "rolout: {num_prompts: 3}\n")
    with pytest.raises(ConfigError, match=rf"{file}.*rolout.*did you mean rollout"):
        configured()
    file.write_text("trainer: {lr: 1}\n")
    with pytest.raises(ConfigError, match="defaults: "):
        configured()
    for text, says in (("trainer:\n\tlr: 1\n", "line 9, column 1"), ("seed: 1\nseed: 2\n", "duplicate key seed")):
        file.write_text(RECIPE + text)
        with pytest.raises(ConfigError, match=rf"{file}: .*{says}"):
            configured()
    file.write_text("defaults: rlloop\n")
    with pytest.raises(ConfigError, match=rf"{file}: .*must be a list"):
        configured()


def test_an_honest_drift_is_allowed_under_observe():
    config = configured("parity.mode=observe", "rollout.profile.linear=stock")
    assert config.rollout.profile.over(config.model.profile) == ProfileConfig(linear="stock")


@pytest.mark.parametrize(
    "key", ["weights=int4", "activations=bf16", "logits=bfloat16", "stale_steps=4", "lossy_sync=true"]
)
def test_require_refuses_a_declared_drift_and_observe_takes_it(key):
    with pytest.raises(
        ConfigError, match=r"rollout\.drift has .*parity\.mode=require refuses; set parity\.mode=observe"
    ):
        configured(f"rollout.drift.{key}", "rollout.drift.from_step=9")
    drift = configured("parity.mode=observe", f"rollout.drift.{key}").rollout.drift
    assert [each.lower() for each in drift.declared] == [key]


@pytest.mark.parametrize(
    ("key", "says"),
    [
        ("weights=int3", "rollout.drift.weights is 'int3'; it must be one of none, bf16"),
        ("granularity=row", "rollout.drift.granularity is 'row'"),
        ("from_step=0", "rollout.drift.from_step is 0"),
        ("stale_steps=-1", "rollout.drift.stale_steps is -1"),
    ],
)
def test_a_drift_that_is_none_is_named(key, says):
    with pytest.raises(ConfigError, match=says):
        configured("parity.mode=observe", f"rollout.drift.{key}")


def test_lossy_sync_says_what_the_weights_are_by_itself():
    with pytest.raises(ConfigError, match=r"leave rollout\.drift\.weights at none"):
        configured("parity.mode=observe", "rollout.drift.lossy_sync=true", "rollout.drift.weights=int4")


def test_a_drift_on_both_sides_is_not_for_a_frozen_tower():
    with pytest.raises(
        ConfigError, match="freeze_vision_tower keeps as it is in the trainer; set one of them to false"
    ):
        configured("rollout.drift.both_sides=true", "rollout.drift.weights=fp4", "trainer.freeze_vision_tower=true")


def test_a_drift_on_both_sides_is_one_of_weights_alone_and_keeps_the_contract():
    drift = configured("rollout.drift.both_sides=true", "rollout.drift.weights=fp4").rollout.drift
    assert drift.declared == ["weights=fp4"]
    for keys in (["weights=none"], ["weights=fp4", "activations=fp4"], ["weights=fp8", "stale_steps=1"]):
        with pytest.raises(ConfigError, match=r"both_sides=true rounds the trainer's weights as the engine's; set"):
            configured(
                "rollout.drift.both_sides=true", "parity.mode=observe", *(f"rollout.drift.{key}" for key in keys)
            )


def test_without_a_drift_its_other_keys_make_no_difference():
    assert configured("rollout.drift.from_step=9", "rollout.drift.granularity=block").rollout.drift.declared == []


def test_a_sweep_is_every_combination_named_by_what_it_sweeps():
    jobs = expand_sweep(["seed=0,1", "trainer.lr=1e-3", "algorithm=grpo,dapo"])
    assert [name for name, _ in jobs] == [
        "seed=0,algorithm=grpo",
        "seed=0,algorithm=dapo",
        "seed=1,algorithm=grpo",
        "seed=1,algorithm=dapo",
    ]
    assert jobs[3][1] == ["seed=1", "trainer.lr=0.001", "algorithm=dapo"]


def test_the_resolved_configuration_is_plain_and_whole():
    plain = as_container(compose_recipe("toy", ["algorithm=dr_grpo"]))
    assert plain["parity"]["mode"] == "require"
    assert plain["algorithm"]["loss_args"]["max_tokens"] == plain["rollout"]["max_tokens"]  # an interpolation
    assert set(plain) == {field.name for field in dataclasses.fields(RunConfig)}


@pytest.mark.slow
def test_every_preset_composes_and_is_found():
    from rlloop.algorithms import advantages_for, loss_for
    from rlloop.algorithms.presets import PRESETS

    for name in PRESETS:
        algorithm = configured(f"algorithm={name}").algorithm
        assert isinstance(algorithm, AlgorithmConfig)
        loss_for(algorithm)
        advantages_for(algorithm, 256, 8)


def test_profiles_mirror_the_numerics():
    ops = [*NumericsProfile.operations(), *SETTINGS]
    assert [field.name for field in dataclasses.fields(ProfileConfig)] == ops
    assert [field.name for field in dataclasses.fields(RolloutProfile)] == ops
    assert vars(ProfileConfig()) == NumericsProfile().as_dict()
    assert vars(DriftConfig()) == dataclasses.asdict(Drift())


def test_configuration_and_command_line_are_light():
    heavy = ("torch", "ray", "vllm", "transformers", "matplotlib", "numba")
    code = (
        "import sys, rlloop, rlloop.cli.main, rlloop.launch.compose, rlloop.config.run, rlloop.types\n"
        "import rlloop.protocols, rlloop.loop.loop\n"
        f"print([name for name in {heavy} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_help_needs_neither_hydra_nor_numpy():
    code = (
        "import sys\nfrom rlloop.cli.main import main\ntry:\n    main(['--help'])\nexcept SystemExit: pass\n"
        "print([name for name in ('hydra', 'omegaconf', 'numpy', 'rich') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_sharded_parameters_are_not_for_a_pipeline():
    assert configured("trainer.layout.dp_shard=2", "trainer.shard=parameters").trainer.shard == "parameters"
    with pytest.raises(ConfigError, match=r"trainer\.shard=parameters is not for a pipeline, .*\.pp is 2; set trainer"):
        configured("trainer.layout.pp=2", "rollout.layout.pp=2", "trainer.shard=parameters")
