"""The report of `rlloop parity`: divergence by type of token, the first operation that differs, the effect of knobs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from rlloop.errors import ConfigError
from rlloop.numerics.profile import NumericsProfile
from rlloop.parity_tool.bisect import FirstDifference, Knob, first_difference, knobs
from rlloop.parity_tool.choice import Choice, choose
from rlloop.parity_tool.measure import Comparison, measure
from rlloop.parity_tool.recorded import Recorded, is_run, sampled_versions, version_of
from rlloop.parity_tool.sequences import Tokens
from rlloop.parity_tool.sides import Definition, Side, Transformers, model_folder, open_side

LINTHRESH = 1e-12  # below this the plot's axis is linear, so that it includes 0


@dataclass(frozen=True)
class Report:
    a: str
    b: str
    comparison: Comparison
    first: FirstDifference | None
    knobs: list[Knob]
    weights: str  # which versions of a run's weights are compared; empty where no side is a run
    note: str  # the part that could not be examined, and why; empty if there is none
    text_only: str  # why no images are compared, where a model reads them; empty if they are

    def as_dict(self) -> dict[str, Any]:
        """JSON values."""
        return {
            "a": self.a,
            "b": self.b,
            "by_type": self.comparison.as_dict(),
            "first_difference": None if self.first is None else asdict(self.first),
            "knobs": [asdict(knob) for knob in self.knobs],
            "weights": self.weights,
            "note": self.note,
            "text_only": self.text_only,
        }


def compare(
    a: str, b: str, dtype: str, prompts: Path | None, count: int, length: int | None, images: int | None = None
) -> Report:
    """Score the same sequences on both sides (`open_side` has their forms) and compare.

    Sequences are a side's own if it has some, else those of `choose`. Left out are prompts with placeholders of images
    that are not known. Raises `ConfigError` or `ModelError`.
    """
    choice, weights = choose((a, b), prompts, count, length, images), _same_weights(a, b)
    known, text_only = _with_known_images(choice.sequences, choice)
    sides: list[Side] = [open_side(text, dtype, known, weights.version) for text in (a, b)]
    for index, side in enumerate(sides):
        if isinstance(side, Recorded):
            kept, text_only = _with_known_images(side.sequences(), choice)
            sides[index] = side.only(kept)
    own = [sequences for side in sides if (sequences := side.sequences()) is not None]
    sequences = own[0] if own else known
    if any(len(each.ids) < 2 for each in sequences):
        raise ConfigError("a sequence has fewer than 2 tokens, so nothing in it is predicted")
    scored = [side.score(sequences) for side in sides]
    comparison = measure(sequences, *scored)
    first, knobs_, note = None, [], ""
    if comparison.first is not None:
        first, knobs_, note = _bisect(sides, sequences, comparison.first, scored)
    return Report(sides[0].name, sides[1].name, comparison, first, knobs_, weights.text, note, text_only)


def _with_known_images(sequences: Sequence[Tokens], choice: Choice) -> tuple[list[Tokens], str]:
    """Without the prompts whose placeholders stand for images that are not known, and what to say of them."""
    kept = [each for each in sequences if choice.placeholder is None or not each.lacks_images(choice.placeholder)]
    if sequences and not kept:
        raise ConfigError("every prompt has placeholders of images, and the images are not known")
    left_out = len(sequences) - len(kept)
    return kept, choice.text_only + (f". Left out: {left_out} prompts with placeholders" if left_out else "")


def _bisect(
    sides: Sequence[Side], sequences: Sequence[Tokens], index: int, scored: Sequence[Any]
) -> tuple[FirstDifference | None, list[Knob], str]:
    a, b = sides
    if not isinstance(a, Definition | Transformers) or not isinstance(b, Definition | Transformers):
        return None, [], "the operation is not known: one side has logprobs only, not a model that can be run again"
    first = first_difference(a, b, sequences[index])
    note = "" if first is not None else "no single result that both sides show differs on that sequence"
    if isinstance(a, Definition) and isinstance(b, Definition):
        return first, knobs(a, b.model.profile, sequences, scored[0]), note
    ours, theirs = (a, scored[1]) if isinstance(a, Definition) else (b, scored[0])
    if not isinstance(ours, Definition):
        return first, [], note
    nearest = NumericsProfile.preset("huggingface")
    if ours.model.indexed_layers():  # sparse attention reads latents; transformers' form has no counterpart here
        nearest = replace(nearest, latent=ours.model.profile.latent)
    return first, knobs(ours.with_profile(nearest), ours.model.profile, sequences, theirs), note


@dataclass(frozen=True)
class _Weights:
    version: int | None = None  # of a run's completions that are compared; None: the run's last
    text: str = ""


def _same_weights(a: str, b: str) -> _Weights:
    """The version of a run's weights that the other side is, as far as its folder tells."""
    for run, other in ((a, b), (b, a)):
        if not is_run(Path(run)):
            continue
        folder, sampled = model_folder(other), sampled_versions(Path(run))
        if folder is None or not sampled:
            return _Weights(None, f"{run}: the completions of its last step, sampled by version {max(sampled)}")
        version = version_of(folder, Path(run))
        if version is None:
            text = f"{run} was last sampled by version {max(sampled)}, and {folder} does not say which version it is"
            return _Weights(None, f"{text}: if it is another one, its updates are part of the difference")
        if version in sampled:
            return _Weights(version, f"Both sides are version {version} of the run's weights")
        return _Weights(
            None,
            f"Not the same weights: {folder} is version {version}, which sampled no completion of the run; compared "
            f"are those of version {max(sampled)}, so the updates between them are part of the difference",
        )
    return _Weights()


# --------------------------------------------------------------------------------------------------------- output


def show(report: Report, console: Console) -> None:
    """Print the report."""
    console.print(f"A  {report.a}\nB  {report.b}", highlight=False, markup=False, soft_wrap=True)
    if report.weights:
        console.print(report.weights, highlight=False, markup=False, soft_wrap=True)
    table = _table("tokens", "all", "differ", "k1", "k3", "mean |d|", "max |d|", "top-1", "experts")
    for name, each in report.comparison.by_type.items():
        experts = "" if each.expert_flips is None else f"{each.expert_flips:.2%}"
        tops = "" if each.top_flips is None else str(each.top_flips)
        numbers = (f"{value:.2e}" if value else "0" for value in (each.k1, each.k3, each.mean, each.largest))
        table.add_row(name, str(each.tokens), str(each.different), *numbers, tops, experts)
    console.print(table)
    if report.text_only:
        console.print(report.text_only, highlight=False, markup=False, soft_wrap=True)
    if report.comparison.all.equal:
        console.print("Equal, bit for bit.")
    if report.first is not None:
        first = report.first
        console.print(
            f"The first operation that differs: {first.op} at {first.where} (profile knob {first.knob}), at "
            f"{first.unit} {first.position}; at most {first.largest:.2g} apart over the sequence",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
    effective = [knob for knob in report.knobs if knob.matters]
    if effective:
        table = _table("knob", "A", "B", "k3 alone", "k3 without")
        for knob in effective:
            table.add_row(knob.name, knob.a, knob.b, f"{knob.alone:.2e}", f"{knob.left:.2e}")
        console.print(table)
    if others := [knob.name for knob in report.knobs if not knob.matters]:
        console.print(f"Different, without effect here: {', '.join(others)}", highlight=False, soft_wrap=True)
    if report.note:
        console.print(report.note, highlight=False, markup=False, soft_wrap=True)


def _table(first: str, *others: str) -> Table:
    table = Table(box=None, collapse_padding=True, pad_edge=False)  # a line of 80 characters holds all columns
    for name in (first, *others):
        table.add_column(name, no_wrap=True)
    return table


def draw(report: Report, file: Path) -> None:
    """Plot k3 by type of token, and of each knob alone."""
    panels = [("k3 by type of token", {name: each.k3 for name, each in report.comparison.by_type.items()})]
    if report.knobs:
        panels.append(("k3 of each knob alone", {knob.name: knob.alone for knob in report.knobs}))
    figure = Figure(figsize=(5.5 * len(panels), 3.2), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (title, values) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        bars = axes.barh(list(values), list(values.values()), color="#0072B2")
        axes.bar_label(bars, [f"{value:.2g}" for value in values.values()], padding=3)
        axes.set_xscale("symlog", linthresh=LINTHRESH)
        axes.set_xticks([0, *(10.0**e for e in range(-12, 4, 3))])
        axes.set_xlim(0, max(*values.values(), LINTHRESH) * 100)
        axes.invert_yaxis()
        axes.set_title(title)
    figure.savefig(file, dpi=120)
