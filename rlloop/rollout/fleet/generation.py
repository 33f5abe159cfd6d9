"""A request for completions, independent of the HTTP dialect it came in, and the pieces of its answer.

A dialect (`rlloop.rollout.fleet.openai_api`, `openai_chat`) parses a body into a `Generation` and writes `Piece`s in
its format; `rlloop.rollout.fleet.answering` runs the request in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, get_args

from rlloop.errors import ConfigError
from rlloop.rollout.fleet.text import Decode, Tokenizer, Writer
from rlloop.types import Completion, ModelInput, Part, PromptScores, SamplingParams

if TYPE_CHECKING:
    from rlloop.models.vision_processor import ImageProcessor  # imports torch

LogprobsMode = Literal["raw_logprobs", "processed_logprobs"]
CONTEXT = 8  # tokens of a prompt after which an echoed completion's are read
LOGPROBS_MODES: dict[str, LogprobsMode] = {mode: mode for mode in get_args(LogprobsMode)}


class BadField(ConfigError):
    """A request with an unsupported or invalid field."""

    def __init__(self, param: str | None, message: str, code: str = "bad_request") -> None:
        super().__init__(message)
        self.param, self.code = param, code


@dataclass(frozen=True)
class Served:
    """Facts about the server that a dialect needs to parse a request."""

    model: str  # its name
    tokenizer: Tokenizer | None
    longest: int  # tokens of a prompt and its completion
    logprobs_mode: LogprobsMode = "processed_logprobs"
    images: ImageProcessor | None = None  # None: its model reads text only
    root: str | None = None  # the model's folder, from which a client on the same host may load the tokenizer


@dataclass(frozen=True, kw_only=True)
class Generation:
    """A parsed request. `prompts` and `sampling` have one entry per choice; a prompt's choices are consecutive and
    share its list."""

    model: str
    prompts: list[list[int]]
    sampling: list[SamplingParams]
    n: int = 1  # choices of one prompt
    lowest: int | None = None  # version of the weights
    highest: int | None = None
    stops: tuple[str, ...] = ()
    keep_stop: bool = False  # in the text
    skip_special_tokens: bool = True  # likewise
    logprobs: int | None = None  # of each token, with so many alternatives
    raw: bool = False  # True: at temperature 1, untruncated
    prompt_logprobs: int | None = None
    echo: bool = False  # text and tokens begin with the prompt's
    only_score: bool = False  # make no tokens
    return_token_ids: bool = False
    names_are_ids: bool = False  # tokens are called `token_id:7`
    stream: bool = False
    usage_in_stream: bool = False
    parses_tools: bool = False  # tool calls in a chat's text
    parses_reasoning: bool = False
    reasoning_opened: bool = False  # the prompt ends inside of reasoning
    request_id: str = ""  # the caller's own
    experts_from: int | None = None  # first prompt token whose experts are returned; None: return none
    image_prompt: ModelInput | None = None  # the one prompt, where it has images

    @property
    def asked(self) -> Sequence[ModelInput | list[int]]:
        """The engine's inputs, one for each choice."""
        return self.prompts if self.image_prompt is None else [self.image_prompt] * len(self.prompts)

    def decode(self, tokenizer: Tokenizer) -> Decode:
        return lambda ids: tokenizer.decode(ids, self.skip_special_tokens)

    @property
    def score(self) -> int | None:
        """Number of alternatives per token for scoring the prompts; None: no scoring."""
        asked = [self.prompt_logprobs, self.logprobs if self.echo else None]
        return max((count for count in asked if count is not None), default=None)

    def usage(self, completions: Sequence[Completion]) -> dict[str, int]:
        prompt = sum(len(completion.prompt_ids) for completion in completions[:: self.n])
        generated = sum(len(completion.token_ids) for completion in completions)
        return {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}


@dataclass(frozen=True)
class Prompt:
    token_ids: list[int]
    scores: PromptScores | None = None
    offsets: list[int] = field(default_factory=list)  # of the tokens, in a text that begins with it


@dataclass
class Piece:
    """A choice's new content since its last piece; or the whole choice."""

    index: int
    part: Part
    text: str = ""
    offsets: list[int] = field(default_factory=list)  # of the tokens, in the whole text; where logprobs are asked for
    prompt: Prompt | None = None  # in a choice's first piece
    completion: Completion | None = None  # in its last one
    stop_reason: str | int | None = None  # likewise: the stop string or token of the request that ended it


class Choice:
    """Turns the tokens of one choice into pieces."""

    def __init__(self, index: int, ask: Generation, tokenizer: Tokenizer | None) -> None:
        self._index, self._ask = index, ask
        self._told = 0  # tokens that pieces have
        self._writer, self._before, self._prompt = writer_for(index, ask, tokenizer), "", Prompt(ask.prompts[index])
        if ask.echo and tokenizer is not None:
            whole = Writer(ask.decode(tokenizer), by_token=ask.logprobs is not None)
            self._before = whole.write(self._prompt.token_ids) + whole.end()
            self._prompt = Prompt(self._prompt.token_ids, None, whole.offsets)

    def more(self, segment: Part, scores: PromptScores | None) -> Piece:
        return self._piece(segment, segment.token_ids, scores)

    def end(self, completion: Completion, scores: PromptScores | None, stopped: bool) -> Piece:
        """The last piece: everything not in earlier ones. `stopped`: by a stop string, so its last token is text."""
        rest = completion.part(self._told)
        ended = completion.finish_reason == "stop" and not stopped
        written = rest.token_ids[:-1] if ended and not self._ask.keep_stop else rest.token_ids
        piece = self._piece(rest, written, scores)
        piece.completion = completion
        if self._writer is not None:
            piece.text += self._writer.end()
            piece.stop_reason = self._writer.stop
        if ended and (last := completion.token_ids[-1]) in completion.sampling.stop_token_ids:
            piece.stop_reason = last
        return piece

    def _piece(self, segment: Part, written: list[int], scores: PromptScores | None) -> Piece:
        """`written`: the number of its tokens that are part of the text."""
        piece = Piece(self._index, segment)
        if self._told == 0:
            piece.prompt, piece.text = replace(self._prompt, scores=scores), self._before
        self._told += len(segment.token_ids)
        if (writer := self._writer) is not None:
            before = len(writer.offsets)
            piece.text += writer.write(written)
            piece.offsets = [len(self._before) + at for at in writer.offsets[before:]]
            if written != segment.token_ids:  # the ending token or stop begins where the text ends
                piece.offsets.append(len(self._before) + writer.length)
        return piece


def writer_for(index: int, ask: Generation, tokenizer: Tokenizer | None) -> Writer | None:
    """The writer of one choice's text; None if the model has no tokenizer."""
    if tokenizer is None:
        return None
    return Writer(
        ask.decode(tokenizer),
        ask.stops,
        keep_stop=ask.keep_stop,
        least=ask.sampling[index].min_tokens,
        context=ask.prompts[index][-CONTEXT:] if ask.echo else (),
        by_token=ask.logprobs is not None,
    )
