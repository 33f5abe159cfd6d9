"""Worlds of trainer and engines, and those that are left when ranks are lost."""

import pytest

from rlloop.config.fleet import FleetConfig, FleetKind
from rlloop.config.layout import LayoutConfig, World, shrunk
from rlloop.config.resume import refuse_other_run
from rlloop.config.rollout import RolloutConfig
from rlloop.config.run import AlgorithmConfig, Launch, RayConfig, RunConfig
from rlloop.config.trainer import TrainerConfig
from rlloop.errors import ConfigError
from rlloop.launch import layouts
from rlloop.launch.layouts import check_launch, crowd
from rlloop.parallel.layout import Layout


def config(trainer=None, rollout=None, shard="optimizer", **keys) -> RunConfig:
    return RunConfig(
        algorithm=AlgorithmConfig(loss="grpo", advantage="group_norm"),
        trainer=TrainerConfig(layout=LayoutConfig(**(trainer or {})), shard=shard),
        rollout=RolloutConfig(layout=LayoutConfig(**(rollout or {}))),
        **keys,
    )


def test_the_larger_layout_is_the_world_and_the_smaller_one_fills_it():
    world = World.of(Layout(dp_shard=4), Layout(tp=2))
    assert (world.size, world.engines) == (4, 2)
    world = World.of(Layout(tp=2), Layout(dp_replicate=2, tp=3))
    assert world.trainer == Layout(dp_replicate=3, tp=2), "ranks that are left over train as well"
    assert (world.size, world.engine, world.engines) == (6, Layout(tp=3), 2)
    assert World.of(Layout(), Layout()).degrees() == {}
    assert World.of(Layout(dp_shard=2), Layout(tp=2)).degrees() == {"trainer": {"dp_shard": 2}, "rollout": {"tp": 2}}


def test_a_remainder_is_refused():
    said = r"trainer.layout has 4 ranks and rollout.layout 3, which leaves 1 of the 4 over; .* divides 4 \(1, 2, 4\)"
    with pytest.raises(ConfigError, match=said):
        config({"dp_shard": 4}, {"tp": 3})


def test_engines_share_weights_where_each_rank_has_the_same_stage_in_both():
    for trainer, rollout in ((Layout(pp=2, dp_shard=2),) * 2, (Layout(dp_shard=2), Layout(pp=2))):
        assert World.of(trainer, rollout).stages_agree
    for trainer, rollout in (
        (Layout(pp=2), Layout()),
        (Layout(pp=2), Layout(tp=2)),
        (Layout(pp=2, dp_shard=2), Layout(pp=2)),
    ):
        assert not World.of(trainer, rollout).stages_agree


def test_keys_of_a_layout_are_named_with_their_section():
    with pytest.raises(ConfigError, match=r"trainer.layout.tp is 0; it must be at least 1"):
        config({"tp": 0})
    with pytest.raises(ConfigError, match=r"rollout.layout.ep is 2, and experts are laid over"):
        config(rollout={"ep": 2})


def test_layouts_shrink_along_data_parallel_axes():
    assert shrunk(Layout(dp_shard=4), Layout(), 3) == (Layout(dp_shard=3), Layout())
    assert shrunk(Layout(dp_replicate=2, dp_shard=2), Layout(), 3)[0] == Layout(dp_shard=2)
    assert shrunk(Layout(dp_shard=4), Layout(tp=2), 3) == (Layout(dp_shard=2), Layout(tp=2))
    assert shrunk(Layout(dp_shard=4, ep=4), Layout(), 4)[0] == Layout(dp_shard=4, ep=4)
    with pytest.raises(ConfigError, match=r"1 rank is left, and trainer.layout \(tp=2\) need more"):
        shrunk(Layout(dp_shard=2, tp=2), Layout(), 1)


def test_experts_lie_over_fewer_ranks_only_where_they_must():
    assert shrunk(Layout(dp_shard=4, ep=2), Layout(), 3)[0] == Layout(dp_shard=2, ep=2)
    spread = Layout(dp_shard=4, ep=4)
    assert shrunk(spread, spread, 3) == (Layout(dp_shard=3, ep=3), Layout(dp_shard=3, ep=3))
    assert shrunk(Layout(dp_shard=2, tp=2, ep=4), Layout(tp=2, ep=2), 3) == (Layout(tp=2, ep=2), Layout(tp=2, ep=2))


def test_several_ranks_need_a_launcher_which_is_named():
    with pytest.raises(ConfigError) as refused:
        check_launch(config({"dp_shard": 2}), 1)
    assert "launch=ray" in str(refused.value)
    assert "torchrun --nproc-per-node 2 -m rlloop train" in str(refused.value)
    with pytest.raises(ConfigError, match=r"is one process. Add launch=ray to the command, or start it as\n  torchrun"):
        check_launch(config({"dp_shard": 2}, fleet=FleetConfig(FleetKind.regions)), 1)
    check_launch(config({"dp_shard": 2}), 2)
    check_launch(config({"dp_shard": 2}, launch=Launch.ray), 1)
    with pytest.raises(ConfigError, match=r"torchrun has started 3 processes. Start it with --nproc-per-node 2"):
        check_launch(config({"dp_shard": 2}), 3)
    for processes, instead in ((4, ", or set trainer.layout.dp_shard=2"), (3, "")):
        with pytest.raises(ConfigError, match=f"Start it with --nproc-per-node 2{instead}$"):
            check_launch(config({"tp": 2}), processes)
    with pytest.raises(ConfigError, match="launch=ray starts its own processes, and torchrun has started 2"):
        check_launch(config({"dp_shard": 2}, launch=Launch.ray), 2)


def test_more_ranks_than_cpus_are_noted(monkeypatch):
    monkeypatch.setattr(layouts, "processors", lambda: 4)
    assert crowd(config({"dp_shard": 4}, launch=Launch.ray)) == ""
    note = crowd(config({"dp_shard": 4}, launch=Launch.ray, ray=RayConfig(replicas=1)))
    assert "5 processes share 4 CPUs" in note
    assert "ray.replicas" in note
    note = crowd(config({"dp_shard": 8}), 8)
    assert "8 processes share 4 CPUs" in note
    assert "ray.replicas" not in note
    assert crowd(config({"dp_shard": 8}), 4) == "", "the others are on another machine"
    elsewhere = RayConfig(address="10.0.0.1:6379")
    for other in ({"ray": elsewhere}, {"device": "cuda"}):
        assert crowd(config({"dp_shard": 8}, launch=Launch.ray, **other)) == ""


def test_what_needs_one_rank_is_refused_with_several():
    with pytest.raises(ConfigError, match=r"device=cuda:1 is for one rank, and trainer.layout .* has 2"):
        config({"dp_shard": 2}, device="cuda:1")


def test_replicas_are_one_beside_one_rank():
    assert config().replicas == 1
    assert config({"dp_shard": 2}).replicas == 0
    assert config({"dp_shard": 2}, ray=RayConfig(replicas=3)).replicas == 3
    assert config(launch=Launch.ray, fleet=FleetConfig(FleetKind.regions)).replicas == 0
    with pytest.raises(ConfigError, match=r"ray.replicas=2 starts some here; set it to 0"):
        config(launch=Launch.ray, fleet=FleetConfig(FleetKind.regions), ray=RayConfig(replicas=2))


def test_layouts_may_change_at_resume(tmp_path):
    run = {"trainer": {"layout": {"dp_shard": 4}, "lr": 1.0}}
    refuse_other_run(tmp_path, run, {"trainer": {"layout": {"dp_shard": 3}, "lr": 1.0}})
