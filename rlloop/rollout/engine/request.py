"""Requests: as objects while they wait, as rows of arrays while they run.

A decode step updates every running request. As rows of arrays, 512 requests take a few numpy calls instead of 512
iterations of a Python loop. So a request moves into a row on admission, and back into its object on preemption.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from rlloop.models.adapter_slots import LoadedAdapter
from rlloop.rollout.engine.choice_store import Choices, ChoiceStore
from rlloop.types import Alternatives, Completion, FinishReason, ModelInput, SamplingParams, as_model_input, stop_ids


@dataclass(eq=False)
class Request:
    """A prompt and its completion so far.

    Example: `Request.of(0, [4, 6, 8], SamplingParams(max_tokens=8, seed=1), eos_token_ids=(2,))`.
    """

    id: int
    model_input: ModelInput  # the prompt
    sampling: SamplingParams  # its seed is set
    stop_ids: tuple[int, ...]  # what ends it: its own stop tokens, and the model's end of sequence unless ignored
    token_ids: np.ndarray  # [known] int64: the prompt, then tokens generated before the last preemption
    logprobs: np.ndarray  # [known] float32 by absolute position; undefined for the prompt
    raw_logprobs: np.ndarray  # [known] float32, likewise
    choices: Callable[[], Choices] = lambda: (None, None)  # waits for experts and selections of its computed tokens
    block_hashes: list[bytes] = field(default_factory=list)  # of its leading full blocks, as far as computed
    adapter: LoadedAdapter | None = None  # the adapter that computes it; None: the model's own, or none
    top: int = 0  # number of likeliest tokens recorded for each drawn token
    likeliest: list[Alternatives] = field(default_factory=list)  # one a token made, where they are
    scored: dict[int, np.ndarray] | None = None  # prefill's logprobs of the prompt, by first token; None: not requested

    @classmethod
    def of(
        cls,
        id: int,
        prompt: ModelInput | list[int],
        sampling: SamplingParams,
        eos_token_ids: tuple[int, ...],
        top: int = 0,
        adapter: LoadedAdapter | None = None,
    ) -> Request:
        model_input = as_model_input(prompt)
        zeros = np.zeros(len(model_input), dtype=np.float32)
        ids = np.array(model_input.token_ids, dtype=np.int64)
        return cls(
            id, model_input, sampling, stop_ids(sampling, eos_token_ids), ids, zeros, zeros, top=top, adapter=adapter
        )

    @property
    def adapter_key(self) -> str | None:
        """Name and version of its adapter, for the names of its blocks."""
        return None if self.adapter is None else self.adapter.key

    @property
    def prompt_ids(self) -> list[int]:
        return self.model_input.token_ids

    def completion(self, policy_version: int, reason: FinishReason) -> Completion:
        """The completion so far, of a request that is not running."""
        begin, (experts, selected) = len(self.prompt_ids), self.choices()
        return Completion(
            prompt_ids=self.prompt_ids,
            token_ids=self.token_ids[begin:].tolist(),
            logprobs=self.logprobs[begin:].copy(),
            raw_logprobs=self.raw_logprobs[begin:].copy(),
            policy_version=policy_version,
            finish_reason=reason,
            sampling=self.sampling,
            routed_experts=experts,
            selected=selected,
            model_input=None if self.model_input.is_text else self.model_input,
            alternatives=Alternatives.joined(self.likeliest[: len(self.token_ids) - begin]),
        )


class RequestTable:
    """Running requests, one row each: R rows, W tokens, B blocks and K stop tokens wide.

    Rows never move while a request runs. The arrays widen to the longest request seen.
    """

    def __init__(self, max_rows: int, page_size: int, choices: ChoiceStore | None = None) -> None:
        self.page_size = page_size
        self.choices = choices
        self.requests: list[Request | None] = [None] * max_rows
        self.tokens = np.zeros((max_rows, 0), dtype=np.int64)  # [R, W]
        self.logprobs = np.zeros((max_rows, 0), dtype=np.float32)  # [R, W] by absolute position
        self.raw_logprobs = np.zeros((max_rows, 0), dtype=np.float32)  # [R, W]
        self.blocks = np.zeros((max_rows, 0), dtype=np.int64)  # [R, B] block ids; beyond num_blocks any valid id
        self.stop_ids = np.full((max_rows, 0), -1, dtype=np.int64)  # [R, K]
        self.num_blocks = np.zeros(max_rows, dtype=np.int64)
        self.length = np.zeros(max_rows, dtype=np.int64)  # tokens known, prompt included
        self.computed = np.zeros(max_rows, dtype=np.int64)  # of these, tokens whose keys and values are in the cache
        self.prompt_length = np.zeros(max_rows, dtype=np.int64)
        self.min_length = np.zeros(max_rows, dtype=np.int64)  # prompt and min_tokens
        self.max_length = np.zeros(max_rows, dtype=np.int64)  # prompt and max_tokens
        self.seed = np.zeros(max_rows, dtype=np.int64)
        self.top = np.zeros(max_rows, dtype=np.int64)  # see Request
        self.adapted = np.zeros(max_rows, dtype=bool)  # requests with an adapter
        self.scored = np.zeros(max_rows, dtype=bool)  # prompts whose logprobs are requested
        self.placed = np.zeros(max_rows, dtype=bool)  # prompts that bring positions of their own
        self.shift = np.zeros(max_rows, dtype=np.int64)  # a token's rope position less its index, after the prompt
        self.row_of: dict[int, int] = {}  # by the request's id
        self._free = list(range(max_rows))[::-1]

    @property
    def num_free(self) -> int:
        return len(self._free)

    def request(self, row: int) -> Request:
        request = self.requests[row]
        assert request is not None, f"row {row} is free"
        return request

    def load(self, request: Request, blocks: list[int], computed: int) -> int:
        """Give the request a row: it holds `blocks`, and `computed` of its tokens are cached already."""
        known, limit = len(request.token_ids), len(request.prompt_ids) + request.sampling.max_tokens
        self._widen(limit, len(request.stop_ids))
        assert request.sampling.seed is not None, "the engine draws the seeds that callers leave out"
        row = self._free.pop()
        self.requests[row] = request
        self.tokens[row, :known] = request.token_ids
        self.logprobs[row, :known] = request.logprobs
        self.raw_logprobs[row, :known] = request.raw_logprobs
        self.blocks[row, : len(blocks)] = blocks
        self.stop_ids[row] = -1
        self.stop_ids[row, : len(request.stop_ids)] = request.stop_ids
        self.num_blocks[row] = len(blocks)
        self.length[row], self.computed[row] = known, computed
        self.prompt_length[row], self.max_length[row] = len(request.prompt_ids), limit
        self.min_length[row] = len(request.prompt_ids) + request.sampling.min_tokens
        self.seed[row], self.top[row] = request.sampling.seed, request.top
        self.adapted[row], self.scored[row] = request.adapter is not None, request.scored is not None
        self.placed[row], self.shift[row] = request.model_input.positions is not None, request.model_input.shift
        self.row_of[request.id] = row
        return row

    def unload(self, row: int) -> tuple[Request, list[int]]:
        """Free the row; returns its request, up to date, and the blocks that it held."""
        request, known = self.request(row), int(self.length[row])
        request.token_ids = self.tokens[row, :known].copy()
        request.logprobs = self.logprobs[row, :known].copy()
        request.raw_logprobs = self.raw_logprobs[row, :known].copy()
        if self.choices is not None:
            at = np.arange(self.computed[row])
            slots = self.blocks[row, at // self.page_size] * self.page_size + at % self.page_size
            request.choices = self.choices.begin_read(slots)
        self.requests[row], self.placed[row], self.scored[row] = None, False, False
        del self.row_of[request.id]
        self._free.append(row)
        return request, self.blocks[row, : self.num_blocks[row]].tolist()

    def rope_positions(self, rows: np.ndarray, begin: np.ndarray, counts: np.ndarray, index: np.ndarray) -> np.ndarray:
        """Positions for the rope, [T] int64, or [axes, T] where a prompt among them has positions of several axes.

        The tokens are `counts` [S] of each row, from its `begin` [S] on; their indices in the sequences are `index`
        [T], which are the positions of a text.
        """
        if not self.placed.any():
            return index
        inside = np.flatnonzero(self.placed[rows] & (begin < self.prompt_length[rows])).tolist()
        inputs = {each: self.request(int(rows[each])).model_input for each in inside}
        return rope_positions(index, begin, counts, np.where(self.placed[rows], self.shift[rows], 0), inputs)

    def _widen(self, tokens: int, stops: int) -> None:
        if tokens > self.tokens.shape[1]:
            width = max(tokens, 2 * self.tokens.shape[1])
            for name in ("tokens", "logprobs", "raw_logprobs"):
                setattr(self, name, _widened(getattr(self, name), width, 0))
            self.blocks = _widened(self.blocks, -(-width // self.page_size), 0)
        if stops > self.stop_ids.shape[1]:
            self.stop_ids = _widened(self.stop_ids, stops, -1)


def rope_positions(
    index: np.ndarray, begin: np.ndarray, counts: np.ndarray, shift: np.ndarray, inputs: Mapping[int, ModelInput]
) -> np.ndarray:
    """`RequestTable.rope_positions` of S sequences: `shift` [S] is of tokens after their prompts; `inputs`, by the
    sequence's number, are those whose prompts go on in this step and have positions of their own."""
    positions = index + np.repeat(shift, counts)
    if not inputs:
        return positions
    segments = np.split(positions, np.cumsum(counts)[:-1])
    for each, model_input in inputs.items():
        first = int(begin[each])
        segments[each] = model_input.positions_at(first, first + int(counts[each]))
    axes = max((segment.shape[:-1] for segment in segments), key=len)
    return np.concatenate([np.broadcast_to(segment, (*axes, segment.shape[-1])) for segment in segments], axis=-1)


def _widened(array: np.ndarray, width: int, fill: int) -> np.ndarray:
    # Fresh zeros take no memory until written, and few rows are as long as the longest request.
    wide = np.zeros((len(array), width), array.dtype) if fill == 0 else np.full((len(array), width), fill, array.dtype)
    wide[:, : array.shape[1]] = array
    return wide
