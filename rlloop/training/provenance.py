"""Bitwise comparison of training data with the sampled sequences that their provenance names."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from rlloop.errors import ConfigError, ParityError
from rlloop.inputs import ContentSpan
from rlloop.models import Model, score
from rlloop.models.adapter_weights import AdapterWeights
from rlloop.training.calls import Item
from rlloop.training.types import PromptProvenanceSpan, SampledProvenanceSpan


@dataclass(eq=False)
class FrozenWeights:
    """Weights frozen at one point in time: an adapter over the base, a whole model's (its live parameters by name), or
    neither, for the base itself. Compared by identity."""

    adapter: AdapterWeights | None = None
    state: dict[str, torch.Tensor] | None = None
    name: str | None = None  # that the base model's registry knows the adapter by
    gone: bool = False  # no sampler uses them any more


@dataclass(frozen=True, eq=False)
class SampledRecord:
    """A sampled sequence, kept for comparison with the trainer."""

    sequence_id: str
    weights: FrozenWeights
    prompt: np.ndarray  # [P] int32
    tokens: np.ndarray  # [T] int32
    raw_logprobs: np.ndarray  # [T] float32, at temperature 1 without truncation
    contents: tuple[ContentSpan, ...] = ()  # of the prompt: its images, by digest


class SampledSequences:
    """The newest `keep` sampled sequences by id, of weights that a sampler holds: a record keeps its weights in memory.
    Called in the worker's thread, and `restore_sequence`'s."""

    def __init__(self, keep: int) -> None:
        self._keep, self._records, self._lock = keep, OrderedDict[str, SampledRecord](), threading.Lock()
        self._of = dict[FrozenWeights, set[str]]()  # ids by weights

    def add(self, record: SampledRecord) -> None:
        with self._lock:
            if record.weights.gone:  # the sampler was dropped during sampling
                return
            self._remove(record.sequence_id)
            self._records[record.sequence_id] = record
            self._of.setdefault(record.weights, set()).add(record.sequence_id)
            while len(self._records) > self._keep:
                self._remove(next(iter(self._records)))

    def forget(self, weights: FrozenWeights) -> None:
        """Drop the sequences of weights that no sampler holds any more."""
        with self._lock:
            weights.gone = True
            for sequence_id in list(self._of.get(weights, ())):
                self._remove(sequence_id)

    def _remove(self, sequence_id: str) -> None:
        record = self._records.pop(sequence_id, None)
        if record is not None:
            self._of[record.weights].discard(sequence_id)
            if not self._of[record.weights]:
                del self._of[record.weights]

    def get(self, sequence_id: str, where: str) -> SampledRecord:
        """The record of a sequence. Raises `ConfigError` for an unknown id."""
        record = self._records.get(sequence_id)
        if record is None:
            raise ConfigError(
                f"{where}: provenance names sequence {sequence_id!r}, which was not sampled here, or has been "
                f"forgotten with its sampler (keep_samplers), or as one of more than {self._keep} (keep_sequences); "
                "train on newer samples, leave the provenance out, or have more kept"
            )
        return record

    def __len__(self) -> int:
        return len(self._records)


@dataclass
class Comparison:
    """The counts of a datum, and its first difference in words."""

    checked: int = 0
    different: int = 0
    first: str | None = None

    def add(self, count: int, wrong: np.ndarray, words: Callable[[int], str]) -> None:
        """`count` tokens, of which those at `wrong` [n] differ."""
        self.checked, self.different = self.checked + count, self.different + len(wrong)
        if len(wrong) and self.first is None:
            self.first = words(int(wrong[0]))

    def require(self) -> None:
        if self.first is not None:
            raise ParityError(f"{self.first}; {self.different} of {self.checked} tokens differ")


def compare(
    items: Sequence[Item],
    logprobs: Sequence[np.ndarray],
    weights: FrozenWeights | None,
    sequences: SampledSequences,
    view: Callable[[FrozenWeights], Model],
) -> list[Comparison | ConfigError]:
    """A comparison for each datum, or the error that prevented it.

    `logprobs`: of each datum's targets under `weights`, those of the forward that trains it. Where a sequence was
    sampled by others, the datum is scored again by the `view` of those.
    """
    comparisons: list[Comparison | ConfigError] = []
    for item, here in zip(items, logprobs, strict=True):
        try:
            comparisons.append(_compare(item, here, weights, sequences, view))
        except ConfigError as error:
            comparisons.append(error)
    return comparisons


def _compare(
    item: Item,
    logprobs: np.ndarray,
    weights: FrozenWeights | None,
    sequences: SampledSequences,
    view: Callable[[FrozenWeights], Model],
) -> Comparison:
    comparison = Comparison()
    if item.provenance is None:
        return comparison
    ids, by_weights = np.asarray(item.row.token_ids[: item.tokens]), {weights: logprobs}
    begin = 0
    for span in item.provenance.model_input:
        record = sequences.get(span.sequence_id, item.where)
        _check_tokens(item, span, record, ids[begin : begin + span.length], "model_input", begin)
        _check_images(item, span, record, begin)
        begin += span.length
    begin = 0
    for span in item.provenance.loss_fn_inputs if item.targets.ndim == 1 else ():
        record, at = sequences.get(span.sequence_id, item.where), slice(begin, begin + span.length)
        _check_tokens(item, span, record, item.targets[at], "target_tokens", begin)
        if isinstance(span, SampledProvenanceSpan) and span.length:
            if record.weights not in by_weights:
                by_weights[record.weights] = _scored(view(record.weights), item)
            here = by_weights[record.weights][at]
            sampled = record.raw_logprobs[span.offset : span.offset + span.length]

            words = partial(_difference, item, span.sequence_id, begin, here, sampled)
            comparison.add(span.length, np.flatnonzero(here.view(np.int32) != sampled.view(np.int32)), words)
        begin += span.length
    return comparison


def _difference(item: Item, sequence_id: str, begin: int, here: np.ndarray, sampled: np.ndarray, index: int) -> str:
    return (
        f"{item.where}: target {begin + index}, token {int(item.targets[begin + index])}, has logprob {here[index]!r}, "
        f"and {sampled[index]!r} when {sequence_id} was sampled, by the same weights: its context is another than the "
        "sampled one's, or engine and trainer differ"
    )


def _check_tokens(
    item: Item,
    span: PromptProvenanceSpan | SampledProvenanceSpan,
    record: SampledRecord,
    tokens: np.ndarray,
    name: str,
    begin: int,
) -> None:
    """Raises `ConfigError` where a span's tokens are not those of the sequence that it names."""
    sampled = isinstance(span, SampledProvenanceSpan)
    source, kind = (record.tokens, "sampled tokens") if sampled else (record.prompt, "prompt")
    of = source[span.offset : span.offset + span.length]
    if len(of) != len(tokens):
        raise ConfigError(
            f"{item.where}: provenance names tokens {span.offset} to {span.offset + span.length} of the {kind} of "
            f"{span.sequence_id}, which has {len(source)}"
        )
    differs = of != tokens
    if name == "target_tokens" and not sampled:  # a client need not know the placeholders' id
        for content in record.contents:
            differs[max(0, content.start - span.offset) : max(0, content.end - span.offset)] = False
    if len(wrong := np.flatnonzero(differs)):
        at = int(wrong[0])
        raise ConfigError(
            f"{item.where}: {name}[{begin + at}] is token {int(tokens[at])}, and provenance says that it is token "
            f"{span.offset + at} of the {kind} of {span.sequence_id}, which is {int(of[at])}; was it tokenized again?"
        )


def _check_images(
    item: Item, span: PromptProvenanceSpan | SampledProvenanceSpan, record: SampledRecord, begin: int
) -> None:
    """Raises `ConfigError` where a span's images, whose placeholders are all alike, are not those of the sequence."""

    def within(contents: Sequence[ContentSpan], first: int) -> list[tuple[int, int, str]]:
        last = first + span.length
        return [(x.start - first, x.end - first, x.digest) for x in contents if x.start < last and first < x.end]

    sampled = isinstance(span, SampledProvenanceSpan)
    own = () if item.row.model_input is None else item.row.model_input.contents
    of = within(() if sampled else record.contents, span.offset)
    if (here := within(own, begin)) != of:
        digests = [", ".join(digest[:12] for *_, digest in each) or "none" for each in (here, of)]
        raise ConfigError(
            f"{item.where}: model_input has images {digests[0]} where provenance names the prompt or tokens of "
            f"{span.sequence_id}, which have {digests[1]} there; send the images that were sampled from"
        )


@torch.no_grad()
def _scored(model: Model, item: Item) -> np.ndarray:
    return score(model, [item.row])[0].cpu().numpy()
