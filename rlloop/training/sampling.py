"""Samplers and their engines: one over the base, whose requests name adapters, and one for whole models."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np
import torch

from rlloop.errors import ConfigError
from rlloop.models import Model, ScoreRow, score
from rlloop.models.logits_processing import warp_for
from rlloop.models.parameters import ParameterStore
from rlloop.models.prompt_scores import score_prompt
from rlloop.models.vision import place_features
from rlloop.numerics.layout import AttentionLayout
from rlloop.rollout import Engine
from rlloop.rollout.fleet.text import Tokenizer, Writer
from rlloop.training.futures import promised
from rlloop.training.provenance import FrozenWeights, SampledRecord, SampledSequences
from rlloop.training.types import (
    EMPTY_LOGPROB,
    PromptAltTokens,
    SampledSequence,
    SampleResponse,
    SamplingParams,
    TopkLogprobs,
)
from rlloop.types import Alternatives, Completion, ModelInput
from rlloop.types import SamplingParams as EngineParams

MOST_SAMPLES, MOST_TOP = 4096, 1024
BASE = FrozenWeights()


@dataclass(eq=False)
class Sampler:
    """An id to sample frozen weights by. `owner`: the model that it was made of; None: the base, or a checkpoint."""

    id: str
    weights: FrozenWeights
    owner: str | None = None
    keeps: bool = False  # until it is dropped by name
    requests: int = 0  # so far


def derived_seed(name: str) -> int:
    """A seed below 2**63, derived from the name."""
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little") >> 1


def first_seed(params: SamplingParams, name: str) -> int:
    """The seed of a request's first completion, from which its other draws have theirs."""
    return derived_seed(name) if params.seed is None else params.seed % (1 << 63)


@dataclass(frozen=True)
class PromptAsk:
    """Values requested for the P tokens of a prompt, besides completions."""

    logprobs: bool = False
    top: int = 0
    last: int | None = None  # of logprobs and top, only those of so many last tokens
    targets: np.ndarray | None = None  # [P - 1, K] int64; -1: none
    draws: int = 0

    @property
    def anything(self) -> bool:
        return self.logprobs or self.top > 0 or self.targets is not None or self.draws > 0

    def check(self, tokens: int, vocabulary: int) -> None:
        """Raises `ConfigError` for what does not fit a prompt of so many tokens."""
        if not 0 <= self.top <= MOST_TOP or not 0 <= self.draws <= MOST_TOP:
            raise ConfigError(
                f"topk_prompt_logprobs is {self.top} and prompt_alt_tokens_k {self.draws}; each may be 0 to {MOST_TOP}"
            )
        if self.last is not None and not (self.logprobs and 1 <= self.last <= tokens - 1):
            raise ConfigError(
                f"prompt_logprobs_last_n is {self.last}; it goes with include_prompt_logprobs, and may be 1 to "
                f"{tokens - 1} for a prompt of {tokens} tokens"
            )
        targets = self.targets
        if targets is not None:
            if targets.ndim != 2 or len(targets) != tokens - 1 or targets.dtype.kind != "i":
                raise ConfigError(
                    f"target_prompt_logprobs is {targets.dtype} {list(targets.shape)}; it must be token ids "
                    f"[{tokens - 1}, K] for a prompt of {tokens} tokens, -1 where nothing is asked"
                )
            if targets.size and (targets.min() < -1 or targets.max() >= vocabulary):
                raise ConfigError(
                    f"target_prompt_logprobs has ids from {targets.min()} to {targets.max()}; the vocabulary's are 0 "
                    f"to {vocabulary - 1}"
                )


@dataclass(eq=False)
class SampleCall:
    """One request: `params` has one entry a completion."""

    sampler: Sampler
    prompt: ModelInput
    params: list[EngineParams]
    sequence_ids: Sequence[str]
    ask: PromptAsk
    top: int
    seed: int
    writers: list[Writer | None]
    future: Future[SampleResponse] = field(default_factory=promised)
    done: dict[int, Completion] = field(default_factory=dict)
    begun: int = 0  # completions that the engine has, or had
    about_prompt: dict[str, object] = field(default_factory=dict)
    asked: bool = False


def engine_params(
    params: SamplingParams, count: int, name: str, room: int, tokenizer: Tokenizer | None
) -> tuple[list[EngineParams], tuple[str, ...]]:
    """An engine's parameters of each of `count` completions, and texts that end them.

    `name`: of the request, which decides seeds; `room`: tokens that a completion may have. Raises `ConfigError`.
    """
    if isinstance(count, bool) or not 0 <= count <= MOST_SAMPLES:
        raise ConfigError(f"num_samples is {count!r}; it must be 1 to {MOST_SAMPLES}")
    stop = [params.stop] if isinstance(params.stop, str) else list(params.stop or ())
    texts = tuple(each for each in stop if isinstance(each, str))
    ids = tuple(each for each in stop if not isinstance(each, str))
    if texts and (ids or not all(texts)):
        raise ConfigError(f"SamplingParams.stop is {params.stop!r:.60}; it must be texts, or token ids, none empty")
    if texts and tokenizer is None:
        raise ConfigError(
            f"SamplingParams.stop has the text {texts[0]!r}, and the base's folder has no tokenizer; give token ids"
        )
    room = room if params.max_tokens is None else params.max_tokens
    if room < 1:
        raise ConfigError(f"SamplingParams.max_tokens is {room}; the prompt must leave room for one token at least")
    first = first_seed(params, name)
    seeds = [first, *(derived_seed(f"{first}/{index}") for index in range(1, count))][:count]
    top_k = 0 if params.top_k == -1 else params.top_k
    shared = EngineParams(
        max_tokens=room, temperature=params.temperature, top_p=params.top_p, top_k=top_k,
        ignore_eos=params.stop is not None and not stop, stop_token_ids=ids,
    )  # fmt: skip
    return [EngineParams(**{**vars(shared), "seed": seed}) for seed in seeds], texts


class Sampling:
    """An engine with its waiting and running requests. For one thread."""

    def __init__(self, engine: Engine, sequences: SampledSequences, *, max_running: int, whole: bool = False) -> None:
        """`whole`: a request's weights are swapped into the engine's model; else requests name adapters."""
        self.engine, self.whole, self._sequences, self._room = engine, whole, sequences, max_running
        self.weights = BASE  # of the engine's own, if `whole`
        self._lent = False  # temporarily replaced
        self._calls: dict[str | None, deque[SampleCall]] = {}  # by owner, those with completions to begin
        self._running: dict[int, tuple[SampleCall, int]] = {}  # by the engine's id

    @property
    def busy(self) -> bool:
        return bool(self._running or any(self._calls.values()))

    @property
    def owners(self) -> int:
        """Owners with requests in this engine."""
        running = {call.sampler.owner for call, _ in self._running.values()}
        return len(running | {owner for owner, calls in self._calls.items() if calls})

    @property
    def waiting(self) -> int:
        """For any thread."""
        return sum(len(calls) for calls in list(self._calls.values()))

    def add(self, call: SampleCall) -> None:
        self._calls.setdefault(call.sampler.owner, deque()).append(call)

    def step(self) -> None:
        """Admit as many completions as there is room for, and compute one token of each."""
        if self._lent and self.weights.state is not None:
            ParameterStore(self.engine.model).copy_from(self.weights.state)
        self._lent = False
        self._begin()
        if not self._running:
            return
        for id, completion in self.engine.step():
            self._finish(*self._running[id], completion)
            del self._running[id]
        for id, (call, index) in list(self._running.items()):
            if (writer := call.writers[index]) is not None:
                writer.write(self.engine.so_far(id, writer.count).token_ids)
                if writer.stop is not None:
                    completion = self.engine.abort(id)
                    assert completion is not None
                    self._finish(call, index, completion)
                    del self._running[id]

    def fail_all(self, error: BaseException) -> None:
        self.engine.abort_all()
        for call in [
            *(call for call, _ in self._running.values()),
            *(c for calls in self._calls.values() for c in calls),
        ]:
            _fail(call, error)
        self._running.clear()
        self._calls.clear()

    def lend(self, weights: FrozenWeights) -> Model:
        """The engine's model with the weights of another whole model, until the next step: they change back then."""
        if weights is not self.weights:
            assert weights.state is not None
            ParameterStore(self.engine.model).copy_from(weights.state)
            self._lent = True
        return self.engine.model

    # ------------------------------------------------------------------------------------------------ requests

    def _begin(self) -> None:
        """Admit completions; owners take turns, and one may use at most half of the room while others wait."""
        held: dict[str | None, int] = {}
        for call, _ in self._running.values():
            held[call.sampler.owner] = held.get(call.sampler.owner, 0) + 1
        while len(self._running) < self._room:
            waiting = [owner for owner, calls in self._calls.items() if calls]
            most = self._room if len(waiting) == 1 and not held.keys() - waiting else max(1, self._room // 2)
            owners = [owner for owner in waiting if held.get(owner, 0) < most]
            if not owners:
                return
            owner = min(owners, key=lambda each: held.get(each, 0))
            calls = self._calls.pop(owner)
            self._calls[owner] = calls  # behind the others
            if not self._take(calls[0]):
                return
            held[owner] = held.get(owner, 0) + 1
            if calls[0].begun == len(calls[0].params) or calls[0].future.done():
                calls.popleft()

    def _take(self, call: SampleCall) -> bool:
        """Begin one completion of a call; False if its weights must wait."""
        if self.whole and call.sampler.weights is not self.weights:
            if self._running:
                return False
            self._exchange(call.sampler.weights)
        weights, model = call.sampler.weights, self.engine.model
        dropped = weights.name is not None and weights.name not in model.adapters  # since the call came
        if dropped and weights.adapter is not None and weights.name is not None:
            model.adapters.add(weights.name, weights.adapter, model.adapter_targets())
        try:
            if not call.asked and call.ask.anything:
                scoring = model if weights.name is None else model.with_adapter(weights.name)
                call.about_prompt = about_prompt(scoring, call)
            call.asked = True
            if call.params:
                params = call.params[call.begun]
                id = self.engine.add_request(call.prompt, params, top_logprobs=call.top, adapter=weights.name)
                self._running[id] = (call, call.begun)
                call.begun += 1
            else:
                call.future.set_result(SampleResponse([], **call.about_prompt))  # type: ignore[arg-type]
        except Exception as error:
            _fail(call, error)
        finally:
            if dropped and weights.name is not None:
                model.adapters.drop(weights.name)
        return True

    @torch.no_grad()
    def _exchange(self, weights: FrozenWeights) -> None:
        assert weights.state is not None
        ParameterStore(self.engine.model).copy_from(weights.state)
        self.weights = weights
        self.engine.set_version(self.engine.policy_version + 1)

    def _finish(self, call: SampleCall, index: int, completion: Completion) -> None:
        writer = call.writers[index]
        if writer is not None:
            writer.write(completion.token_ids[writer.count :])
            if writer.stop is not None:
                completion = completion.stopped_at(writer.count)
        call.done[index] = completion
        self._sequences.add(
            SampledRecord(
                call.sequence_ids[index],
                call.sampler.weights,
                np.asarray(completion.prompt_ids, np.int32),
                np.asarray(completion.token_ids, np.int32),
                completion.raw_logprobs,
                call.prompt.named_contents(),
            )
        )
        if len(call.done) == len(call.params) and not call.future.done():
            sequences = [
                SampledSequence(
                    "stop" if (sample := call.done[at]).finish_reason == "stop" else "length", call.sequence_ids[at],
                    sample.token_ids, sample.logprobs, top_of(sample.alternatives, call.top) if call.top else None,
                    sample.raw_logprobs,
                )
                for at in range(len(call.params))
            ]  # fmt: skip
            call.future.set_result(SampleResponse(sequences, **call.about_prompt))  # type: ignore[arg-type]


def _fail(call: SampleCall, error: BaseException) -> None:
    if not call.future.done():
        call.future.set_exception(error)


# ---------------------------------------------------------------------------------------------------- prompts


def top_of(alternatives: Alternatives | None, count: int, *, raw: bool = False) -> TopkLogprobs:
    """As Tinker has them: [T, count], empty cells filled. `raw`: at temperature 1."""
    if alternatives is None:
        return TopkLogprobs(np.zeros((0, count), np.int32), np.zeros((0, count), np.float32))
    logprobs = alternatives.raw_logprobs if raw else alternatives.logprobs
    rows, have = logprobs.shape
    ids, values = np.zeros((rows, count), np.int32), np.full((rows, count), EMPTY_LOGPROB, np.float32)
    possible = np.isfinite(logprobs)
    ids[:, :have] = np.where(possible, alternatives.token_ids, 0)
    values[:, :have] = np.where(possible, logprobs, EMPTY_LOGPROB)
    return TopkLogprobs(ids, values)


@torch.no_grad()
def about_prompt(model: Model, call: SampleCall) -> dict[str, object]:
    """The fields of `SampleResponse` that a request wants for its prompt."""
    ask, ids, fields = call.ask, call.prompt.token_ids, {}
    if ask.logprobs or ask.top:
        scores = score_prompt(model, call.prompt, ask.top)
        first = 1 if ask.last is None else len(ids) - ask.last
        logprobs = np.full(len(ids), np.nan, np.float32)
        logprobs[first:] = scores.logprobs[first - 1 :]
        if ask.logprobs:
            fields["prompt_logprobs"] = logprobs
        if ask.top:
            top = top_of(scores.alternatives, ask.top, raw=True)
            token_ids = np.zeros((len(ids), ask.top), np.int32)
            values = np.full((len(ids), ask.top), EMPTY_LOGPROB, np.float32)
            token_ids[first:], values[first:] = top.token_ids[first - 1 :], top.logprobs[first - 1 :]
            fields["topk_prompt_logprobs"] = TopkLogprobs(token_ids, values)
    if ask.targets is not None:
        asked = ask.targets
        fields["target_prompt_logprobs"] = np.zeros(asked.shape, np.float32)
        if asked.size:
            row = ScoreRow(ids, range(1, len(ids)), targets=asked.clip(0), model_input=call.prompt)
            scored = score(model, [row])[0].cpu().numpy().reshape(asked.shape)
            fields["target_prompt_logprobs"] = np.where(asked < 0, np.float32(0), scored)
    if ask.draws:
        fields["prompt_alt_tokens"] = _draws(model, call)
    return fields


def _draws(model: Model, call: SampleCall) -> PromptAltTokens:
    count, draws, device = len(call.prompt) - 1, call.ask.draws, model.context.device
    tokens, logprobs = np.zeros((count, draws), np.int64), np.zeros((count, draws), np.float32)
    if not count:
        return PromptAltTokens(tokens, logprobs)
    read = torch.tensor(call.prompt.token_ids[:-1], device=device)
    positions = torch.from_numpy(call.prompt.positions_at(0, count)).to(device)
    images = place_features([(call.prompt, 0, count, 0)], model.see)
    hidden = model.hidden(read, positions, AttentionLayout.of_sequences([count], device), images=images)
    indices = torch.arange(1, count + 1, device=device)  # of the tokens that are drawn
    params = EngineParams(max_tokens=1, temperature=call.params[0].temperature)
    rows = max(1, (1 << 25) // model.vocab_size)  # of logits at a time
    for begin in range(0, count, rows):
        at = slice(begin, min(begin + rows, count))
        logits, of = model.logits(hidden[at]), indices[at]
        warp = warp_for([params], np.zeros(1, np.int64), model.eos_token_ids, device=device, counts=[len(of)])
        for draw in range(draws):
            seeds = torch.full_like(of, derived_seed(f"{call.seed}/alternatives/{draw}"))
            ids, draw_logprobs, _ = model.output.sample(logits, warp, seeds, of)
            tokens[at, draw], logprobs[at, draw] = ids.cpu().numpy(), draw_logprobs.cpu().numpy()
    return PromptAltTokens(tokens, logprobs)
