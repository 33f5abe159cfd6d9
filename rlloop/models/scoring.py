"""The trainer's path: differentiable logprobs of given tokens, by the operations that the engine samples with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from rlloop.errors import ConfigError
from rlloop.models.logits_processing import warp_for
from rlloop.models.routing_record import RoutingRecord
from rlloop.models.shared_prompts import Pieces, shared_tokens, why_not_shared
from rlloop.models.transformer import Model
from rlloop.models.vision import PlacedFeatures, check_images, place_features
from rlloop.numerics.layout import AttentionLayout, LogitsProcessing
from rlloop.numerics.transfer import on_device
from rlloop.parallel.cut import share, shares
from rlloop.parallel.differentiable import gathered
from rlloop.parallel.progress import tick
from rlloop.types import ModelInput, SamplingParams, as_model_input, is_ids


@dataclass(frozen=True)
class ScoreRow:
    """One sequence and the indices of its tokens to score.

    Example: prompt [7, 8] and completion [3, 2]: `ScoreRow([7, 8, 3, 2], range(2, 4))`.
    """

    token_ids: list[int]
    predict: Sequence[int]  # [P] ascending indices, 1 or more: each token is predicted from those before it
    sampling: SamplingParams | None = None  # of the distribution to score under; None: temperature 1, nothing truncated
    routed_experts: np.ndarray | None = None  # [tokens, layers, top_k], as the engine recorded them
    selected: np.ndarray | None = None  # [tokens, layers], likewise
    model_input: ModelInput | None = None  # of its first tokens, where they are more than text
    targets: np.ndarray | None = None  # [P] or [P, K]: tokens to score in place of the sequence's own; no cp above 1

    @cached_property
    def tokens(self) -> np.ndarray:
        """`token_ids` in whatever type NumPy gives them."""
        try:
            return np.asarray(self.token_ids)
        except ValueError:  # lists among numbers, which `check_rows` refuses
            return np.asarray(self.token_ids, object)

    @cached_property
    def picked(self) -> np.ndarray:
        """`predict` as int64."""
        at = self.predict
        return np.arange(at.start, at.stop, at.step) if isinstance(at, range) else np.asarray(at, np.int64)

    def positions(self, count: int) -> np.ndarray:
        """[count] or [axes, count]: of its first tokens, for the rope."""
        return np.arange(count) if self.model_input is None else self.model_input.positions_at(0, count)


class RedrawRecord:
    """Raw logprobs and redrawn tokens at the N predicted tokens of one forward or several, in order.

    Filled by `score(..., record=...)` from the logits that the logprobs come from.
    """

    def __init__(self, *, draws: bool = True) -> None:
        """`draws`: True to draw tokens again; raw logprobs are always recorded."""
        self.draws = draws
        self._raw: list[Tensor] = []
        self._ids: list[Tensor] = []

    def add(self, raw: Tensor, ids: Tensor) -> None:
        self._raw.append(raw)
        self._ids.append(ids)

    @property
    def raw_logprobs(self) -> Tensor:
        """[N] float32, of the rows' tokens at temperature 1, nothing truncated."""
        return torch.cat(self._raw)

    @property
    def token_ids(self) -> Tensor:
        """[N] int64: the tokens drawn by (seed, index); −1 where none was drawn."""
        return torch.cat(self._ids)


def score(
    model: Model,
    rows: Sequence[ScoreRow],
    *,
    replay: bool = False,
    watch: Callable[[RoutingRecord, list[ScoreRow]], None] | None = None,
    record: RedrawRecord | None = None,
    share: bool = False,
) -> tuple[Tensor, Tensor]:
    """Logprob and entropy of every predicted token, from one forward over the sequences laid end to end.

    Returns ([N] float32, [N] float32) in order, both differentiable, N the number of predicted tokens of all rows (of
    `targets` [P, K] all P K, row by row). With
    `replay` every token takes the experts that its row has recorded. `watch` is called with the model's choices and the
    rows that they are of: those with a token to predict. `record` collects raw logprobs and redrawn tokens.

    The prompt that consecutive rows have in common is computed once, with the same bits, without a gradient. `share`:
    with a gradient as well, which is then a sum of another order. Where `shared_prompts` cannot, rows stay whole.

    Raises `ConfigError` for a token outside the vocabulary or a sequence beyond the model's positions.
    """
    tick()
    check_rows(model, rows)
    used = [row for row in rows if len(row.predict)]
    routes = RoutingRecord(_replayed(model, used) if replay and used and model.route_shape() is not None else None)
    scored = _score(model, used, routes, record, share)
    if watch is not None and used:
        watch(routes, used)
    return scored


def hidden_states(model: Model, rows: Sequence[ScoreRow]) -> Tensor:
    """[N, D]: the last hidden state before each predicted token, differentiable; N as for `score`. Whole on every rank,
    but not in a pipeline."""
    tick()
    check_rows(model, rows)
    hidden, _, _, counts = _predicted(model, [row for row in rows if len(row.predict)], None)
    return gathered(hidden, model.context.ranks("cp"), counts)


def _replayed(model: Model, rows: Sequence[ScoreRow]) -> Tensor:
    """[T, layers, top_k]: the recorded experts of the tokens that the forward reads."""
    choices = []
    for index, row in enumerate(rows):
        if row.routed_experts is None or len(row.routed_experts) < int(row.predict[-1]):
            raise ConfigError(
                f"sequence {index} carries no expert choices for its {int(row.predict[-1])} tokens, so they cannot be "
                "replayed; sample with Engine(..., record_choices=True)"
            )
        choices.append(row.routed_experts[: int(row.predict[-1])])
    return on_device(np.concatenate(choices).astype(np.int64), model.context.device)


def token_logprobs(
    model: Model,
    sequences: Sequence[tuple[ModelInput | Sequence[int], Sequence[int]]],
    *,
    sampling: Sequence[SamplingParams | None] | None = None,
    max_tokens: int | None = None,
    adapter: str | None = None,
) -> list[Tensor]:
    """Differentiable logprobs of completions given their prompts, as the trainer computes them.

    `sequences` are (prompt, completion_ids), the prompt as token ids or a `ModelInput`. `sampling`, one a sequence, is
    the distribution to score under (None: temperature 1, nothing truncated, so equal to an engine's `raw_logprobs`).
    Returns one [T] float32 tensor each.

    `max_tokens` bounds the tokens of one forward (a longer sequence goes alone); None: one forward for all. It affects
    memory, not bits. `adapter`: the name of a loaded adapter that computes every token; None: the model as it is.

    Raises `ConfigError` for an empty prompt, a token outside the vocabulary, a sequence beyond the model's positions,
    or a `sampling` of another length.
    """
    if adapter is not None:
        model = model.with_adapter(adapter)
    if sampling is None:
        sampling = [None] * len(sequences)
    if isinstance(sampling, SamplingParams):
        raise ConfigError("sampling is one SamplingParams; give a list, one for each sequence, or None")
    if odd := [pair for pair in sequences if not isinstance(pair, tuple | list) or len(pair) != 2 or pair[1] is None]:
        raise ConfigError(f"sequences holds {odd[0]!r:.80}; each must be a pair (prompt, completion_ids)")
    if odd := [each for each in sampling if each is not None and not isinstance(each, SamplingParams)]:
        raise ConfigError(f"sampling holds {odd[0]!r:.80}; each must be SamplingParams, or None")
    if len(sampling) != len(sequences):
        raise ConfigError(
            f"sampling has {len(sampling)} entries for {len(sequences)} sequences; give one each, or None"
        )
    rows = []
    for index, ((prompt, completion), params) in enumerate(zip(sequences, sampling, strict=True)):
        if not len(prompt):
            raise ConfigError(f"sequence {index} has an empty prompt; it must have at least one token")
        begin = as_model_input(prompt)
        written = range(len(begin), len(begin) + len(completion))
        rows.append(ScoreRow([*begin.token_ids, *completion], written, params, model_input=begin))
    check_rows(model, rows)
    return [
        logprobs
        for batch in _batches(rows, max_tokens)
        for logprobs in _score(model, batch)[0].split([len(row.predict) for row in batch])
    ]


@dataclass(frozen=True)
class Redrawn:
    """One row's P predicted tokens, drawn and scored again on the trainer's path."""

    token_ids: np.ndarray  # [P] int64: drawn by the row's seed
    logprobs: np.ndarray  # [P] float32, of the row's tokens under its `sampling`
    raw_logprobs: np.ndarray  # [P] float32, of the row's tokens at temperature 1, nothing truncated


@torch.no_grad()
def redraw(model: Model, rows: Sequence[ScoreRow], *, max_tokens: int | None = None) -> list[Redrawn]:
    """Draw every predicted token of each row again, given the row's tokens before it.

    An engine's token is a function of the weights, the tokens before it, `sampling` and (seed, index). So with the
    weights that sampled, `token_ids` are the row's at every index; one that differs was not drawn from this
    distribution by this random number. The turns of a conversation are drawn as their engine drew them. This holds
    under a profile that keeps the contract, whatever else is in the batch.

    `max_tokens` bounds the tokens of one forward and affects no bits.

    Raises `ConfigError` as `score`, and where a row that predicts anything names no seed.
    """
    check_rows(model, rows)
    for index, row in enumerate(rows):
        if len(row.predict) and (row.sampling is None or row.sampling.seed is None):
            raise ConfigError(f"sequence {index} names no seed, so its tokens cannot be drawn again")
    return [drawn for batch in _batches(rows, max_tokens) for drawn in _redraw(model, batch)]


def _redraw(model: Model, rows: list[ScoreRow]) -> list[Redrawn]:
    used = [row for row in rows if len(row.predict)]
    if not used:
        return [Redrawn(np.zeros(0, np.int64), *[np.zeros(0, np.float32)] * 2) for _ in rows]
    record = RedrawRecord()
    logprobs, _ = _score(model, used, RoutingRecord(), record)
    cuts = np.cumsum([len(row.predict) for row in rows])[:-1]
    flat = (record.token_ids, logprobs, record.raw_logprobs)
    return [Redrawn(*each) for each in zip(*(np.split(x.cpu().numpy(), cuts) for x in flat), strict=True)]


def _score(
    model: Model,
    rows: Sequence[ScoreRow],
    routes: RoutingRecord | None = None,
    record: RedrawRecord | None = None,
    share: bool = False,
) -> tuple[Tensor, Tensor]:
    device = model.context.device
    used = [row for row in rows if len(row.predict)]
    if not used:
        return torch.zeros(0, device=device), torch.zeros(0, device=device)
    hidden, targets, warp, counts = _predicted(model, used, routes, share)
    cp = model.context.ranks("cp")
    own = slice(sum(counts[: cp.rank]), sum(counts[: cp.rank + 1]))  # of all predicted tokens, this rank's
    targets, warp = targets[own], warp if cp.size == 1 else warp.rows(own.start, own.stop)
    if record is None:
        logprobs, entropies = model.output.token_logprob(hidden, targets, warp)
    else:
        seeds, positions = (on_device(each[own], device) for each in _random_names(used))
        logprobs, entropies, raw, ids = model.output.token_redraw(
            hidden, targets, warp, seeds if record.draws else None, positions
        )
        record.add(cp.gather(raw, 0, counts), cp.gather(ids, 0, counts))
    return gathered(logprobs, cp, counts), gathered(entropies, cp, counts)


def _random_names(used: Sequence[ScoreRow]) -> tuple[np.ndarray, np.ndarray]:
    """[N] int64 each: seeds (−1: none) and indices of the predicted tokens, which name their random numbers."""
    seeds = [-1 if row.sampling is None or row.sampling.seed is None else row.sampling.seed for row in used]
    indices = [row.picked for row in used]
    return np.repeat(np.array(seeds, np.int64), [len(each) for each in indices]), np.concatenate(indices)


def _predicted(
    model: Model, used: Sequence[ScoreRow], routes: RoutingRecord | None, share: bool = False
) -> tuple[Tensor, Tensor, LogitsProcessing, list[int]]:
    """One forward for all rows: hidden states [N, D] that the predicted tokens come from, these tokens [N], and how
    their logits are processed; of hidden states each context-parallel rank has its own, as many as the counts say."""
    device = model.context.device
    picked = [row.picked for row in used]
    # The last scored token, and those after it, are not read: nothing is predicted from them.
    tokens = [row.tokens.astype(np.int64, copy=False) for row in used]
    lengths, trains = [int(at[-1]) for at in picked], torch.is_grad_enabled()
    replays = routes is not None and routes.replays
    sharing = (share or not trains) and not replays and why_not_shared(model, trains=trains) is None
    pieces = Pieces.of(lengths, shared_tokens(used) if sharing else [0] * len(used))

    def flat(arrays: list[np.ndarray]) -> Tensor:
        return on_device(np.concatenate(arrays), device)

    hidden = model.hidden(
        flat([tokens[row][begin:end] for row, begin, end in pieces.spans]),
        on_device(_positions(used, pieces.spans), device),
        AttentionLayout.of_families(pieces.families, device),
        routes=routes,
        images=_images(model, used, pieces.spans),
    )
    if routes is not None and pieces.shares:
        routes.spread(flat(pieces.places))
    warp = warp_for(
        [row.sampling for row in used],
        _tokens_made(picked),
        model.eos_token_ids,
        device=device,
        counts=[len(at) for at in picked],
    )
    before = np.concatenate([at - 1 + start for at, start in zip(picked, pieces.starts, strict=True)])
    scored = [
        row.targets if row.targets is not None else ids[at] for row, ids, at in zip(used, tokens, picked, strict=True)
    ]
    targets = flat([each.reshape(-1) for each in scored])
    cp = model.context.ranks("cp")
    rows = shares(sum(lengths), cp.size)
    if routes is not None and cp.size > 1:
        routes.gather(cp, rows)
    cuts = np.searchsorted(before, np.cumsum([0, *rows]))
    mine = before[cuts[cp.rank] : cuts[cp.rank + 1]] - sum(rows[: cp.rank])
    hidden = hidden.index_select(0, on_device(mine, device))
    if len(targets) == len(before):
        return hidden, targets, warp, np.diff(cuts).tolist()
    assert cp.size == 1
    assert all(row.sampling is None for row in used)
    pairs = zip(
        hidden.split([len(at) for at in picked]), scored, strict=True
    )  # copies, so that their gradients add in order
    wide = [
        states if each.ndim == 1 else states[:, None].expand(-1, each.shape[1], -1).flatten(0, 1)
        for states, each in pairs
    ]
    return torch.cat(wide), targets, warp, [len(targets)]


def _images(model: Model, rows: Sequence[ScoreRow], spans: Sequence[tuple[int, int, int]]) -> PlacedFeatures | None:
    *starts, total = accumulate((end - begin for _, begin, end in spans), initial=0)
    segments = [(rows[row].model_input, begin, end, at) for (row, begin, end), at in zip(spans, starts, strict=True)]
    cp = model.context.ranks("cp")
    if cp.size == 1:
        return place_features(segments, model.see)
    first, last = share(total, cp.size, cp.rank)  # this rank's tokens; it does not see others' images
    own = (
        (each, max(begin, begin + first - at), min(end, begin + last - at), max(at, first))
        for each, begin, end, at in segments
    )
    return place_features(own, model.see)


def _positions(rows: Sequence[ScoreRow], spans: Sequence[tuple[int, int, int]]) -> np.ndarray:
    """[T] int64, or [axes, T] where a row has positions of several axes: a text's are the same on each."""
    positions = [rows[row].positions(end)[..., begin:] for row, begin, end in spans]
    axes = max((each.shape[:-1] for each in positions), key=len)
    return np.concatenate([np.broadcast_to(each, (*axes, each.shape[-1])) for each in positions], axis=-1)


def _tokens_made(picked: Sequence[np.ndarray]) -> np.ndarray:
    """[N] tokens that the engine had made before each predicted one; a gap (another's turn) begins a new completion.

    Example: [[4, 5, 6, 9, 10], [2, 3]] -> [0, 1, 2, 0, 1, 0, 1].
    """
    flat = np.concatenate(picked)
    begins = np.diff(flat, prepend=flat[0]) != 1
    begins[np.cumsum([0, *(len(at) for at in picked[:-1])])] = True
    at = np.arange(len(flat))
    return at - np.maximum.accumulate(np.where(begins, at, 0))


def _batches(rows: Sequence[ScoreRow], max_tokens: int | None) -> Iterator[list[ScoreRow]]:
    """Consecutive rows of at most `max_tokens` tokens together, or of one longer row."""
    batch, total = [], 0
    for row in rows:
        if batch and max_tokens is not None and total + len(row.token_ids) > max_tokens:
            yield batch
            batch, total = [], 0
        batch.append(row)
        total += len(row.token_ids)
    if batch:
        yield batch


def check_rows(model: Model, rows: Sequence[ScoreRow]) -> None:
    """Raises `ConfigError` for rows that the model cannot score, by their index."""
    vocabulary, limit = model.vocab_size, model.max_positions
    for index, row in enumerate(rows):
        ids, tokens = row.token_ids, row.tokens
        if not is_ids(tokens):
            raise ConfigError(f"sequence {index} is {ids!r:.60}; it must be a list of token ids")
        if len(ids) > limit:
            raise ConfigError(f"sequence {index} has {len(ids)} tokens; the model has {limit} positions")
        check_predicted(index, row)
        prompt = row.predict[0] if len(row.predict) else len(ids)
        check_images(ids if row.model_input is None else row.model_input, model.config, prompt)
        if row.model_input is not None and (last := row.positions(len(ids)).max(initial=0)) >= limit:
            raise ConfigError(f"sequence {index} has position {last}; the model has {limit} positions, from 0 on")
        stops = row.sampling.stop_token_ids if row.sampling is not None else ()
        if wrong := [id for id in (int(tokens.min()), int(tokens.max()), *stops) if not 0 <= id < vocabulary]:
            raise ConfigError(
                f"sequence {index} has token id {wrong[0]}; the vocabulary's ids are 0 to {vocabulary - 1}"
            )


def check_predicted(index: int, row: ScoreRow) -> None:
    """Raises `ConfigError` unless `predict` names tokens of the row, in order, that have one before them."""
    at = row.predict if isinstance(row.predict, range) else row.picked  # a range, the usual case, is no array
    ascending = at.step > 0 if isinstance(at, range) else (at[1:] > at[:-1]).all()
    if len(at) and not (ascending and at[0] >= 1 and at[-1] < len(row.token_ids)):
        raise ConfigError(
            f"sequence {index} of {len(row.token_ids)} tokens predicts those at {row.predict!r:.60}; they must be "
            "ascending indices from 1 on, since each is predicted from those before it: a prompt has at least one token"
        )
