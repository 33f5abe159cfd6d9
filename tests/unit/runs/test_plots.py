import struct

from matplotlib.axes import Axes

from rlloop.runs.plots import LINTHRESH, draw

RECORDS = [
    {"step": 0, "eval/solved": 0.2, "eval/reward": 0.3},
    {"step": 1, "reward/mean": 0.3, "reward/solved": 0.25, "parity/k3": 0.0},
    {"step": 2, "reward/mean": 0.4, "reward/solved": 0.35, "parity/k3": None},
    {"step": 3, "reward/mean": 0.5, "reward/solved": 0.45, "parity/k3": 1e-3, "eval/solved": 0.5, "eval/reward": 0.7},
]


def test_every_panel_is_drawn_and_zero_has_a_place_on_the_kl_axis(tmp_path, monkeypatch):
    drawn, limits = [], []
    plot, set_ylim = Axes.plot, Axes.set_ylim
    monkeypatch.setattr(Axes, "plot", lambda axes, *args, **style: drawn.append(args[:2]) or plot(axes, *args, **style))
    monkeypatch.setattr(Axes, "set_ylim", lambda axes, *args, **kw: limits.append(args) or set_ylim(axes, *args, **kw))
    draw({"run": RECORDS}, tmp_path / "curve.png")
    assert drawn == [  # the training batch and its running mean beneath, then what was held out
        ((1, 2, 3), (0.3, 0.4, 0.5)),
        ((1, 2, 3), [0.3, 0.4, 0.5]),
        ((0, 3), (0.3, 0.7)),
        ((1, 2, 3), (0.25, 0.35, 0.45)),
        ((1, 2, 3), [0.25, 0.35, 0.45]),
        ((0, 3), (0.2, 0.5)),
        ((1, 3), (0.0, 1e-3)),
    ]
    assert (-LINTHRESH, 3e-3) in limits
    width, height = struct.unpack(">II", (tmp_path / "curve.png").read_bytes()[16:24])
    assert (width, height) == (1440, 432)


def test_the_same_records_make_the_same_bytes(tmp_path):
    for name in ("a.png", "b.png"):
        draw({"one": RECORDS, "two": RECORDS[:2]}, tmp_path / name)
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


def test_the_running_mean_is_smooth_and_the_legend_covers_no_line(tmp_path, monkeypatch):
    drawn = []
    plot = Axes.plot
    monkeypatch.setattr(
        Axes, "plot", lambda axes, *args, **style: drawn.append((axes, args)) or plot(axes, *args, **style)
    )
    draw(
        {"run": [{"step": step, "reward/mean": step % 2, "eval/reward": 1.0} for step in range(1, 91)]},
        tmp_path / "c.png",
    )
    [means, held_out] = [args[1] for axes, args in drawn[1:3]]
    assert set(means[5:]) == {1 / 3, 2 / 3}  # a window of 3
    axes = drawn[0][0]
    box = axes.get_legend().get_window_extent()
    assert axes.transData.transform((0, max(held_out)))[1] < box.y0


def test_of_rewards_that_are_not_pass_or_fail_there_is_no_panel_of_pass_at_1(tmp_path, monkeypatch):
    titles = []
    monkeypatch.setattr(Axes, "set", lambda axes, **names: titles.append(names["title"]))
    continuous = [{"step": 1, "reward/mean": 0.43, "reward/solved": 0.0}]
    draw({"run": continuous}, tmp_path / "c.png")
    assert titles == ["reward", "train-inference KL (k3)"]
    draw({"run": continuous, "other": RECORDS}, tmp_path / "c.png")
    assert titles[2:] == ["reward", "pass@1", "train-inference KL (k3)"]


def test_a_run_on_given_completions_has_its_loss_in_place_of_rewards(tmp_path, monkeypatch):
    titles, drawn = [], []
    plot = Axes.plot
    monkeypatch.setattr(Axes, "plot", lambda axes, *args, **style: drawn.append(args[1]) or plot(axes, *args, **style))
    monkeypatch.setattr(Axes, "set", lambda axes, **names: titles.append(names["title"]))
    step = {"reward/mean": 0.0, "reward/solved": 0.5, "parity/k3": 0.0, "loss/total": 0.6}
    records = [{"step": 0, "eval/solved": 0.2, "eval/reward": 0.2}, {"step": 1, **step}]
    draw({"run": records}, tmp_path / "c.png", "demonstrations")
    assert titles == ["loss", "pass@1", "train-inference KL (k3)"]
    assert drawn == [(0.6,), [0.6], (0.2,), (0.0,)]
    draw({"run": records[:1]}, tmp_path / "c.png", "demonstrations")  # ended before its first step
    draw({"run": [{"step": 1, "reward/mean": 0.0}]}, tmp_path / "c.png", "demonstrations")  # nothing was trained
    assert titles[3:] == ["pass@1", "train-inference KL (k3)"]
    pairs = [*records, {"step": 2, **step, "loss/reward_accuracy": 0.9}]
    draw({"run": pairs}, tmp_path / "c.png", "preferences")
    draw({"run": pairs}, tmp_path / "c.png", "verdicts")
    assert titles[5:] == [
        *("loss", "preference accuracy", "pass@1", "train-inference KL (k3)"),
        *("loss", "preference accuracy", "train-inference KL (k3)"),
    ]
