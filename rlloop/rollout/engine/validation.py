"""Checks of requests, and seeds for requests without one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from rlloop.errors import ConfigError
from rlloop.types import ModelInput, SamplingParams, is_ids, stop_ids


@dataclass(frozen=True)
class Limits:
    """The sizes that a request must fit into."""

    vocabulary: int  # tokens
    positions: int  # of the model
    cache_tokens: int  # tokens that one request may have in the cache
    eos_token_ids: tuple[int, ...]

    @property
    def longest(self) -> int:
        """Tokens that a prompt and its completion may have together; the last one is never cached."""
        return min(self.positions, self.cache_tokens + 1)


def check_request(prompt: ModelInput | list[int], sampling: SamplingParams, limits: Limits) -> None:
    """Raises `ConfigError` for a request that does not fit into `limits`."""
    prompt_ids = prompt.token_ids if isinstance(prompt, ModelInput) else prompt
    vocabulary, eos_token_ids = limits.vocabulary, limits.eos_token_ids
    if not is_ids(prompt_ids):
        raise ConfigError(f"a prompt is {prompt_ids!r:.60}; it must be a list of token ids, and prompts a list of such")
    if len(prompt_ids) == 0:
        raise ConfigError("a prompt is empty; it must have at least one token")
    for what, ids in (("prompt", prompt_ids), ("stop_token_ids", sampling.stop_token_ids)):
        if len(ids) and (min(ids) < 0 or max(ids) >= vocabulary):
            wrong = next(id for id in ids if not 0 <= id < vocabulary)
            raise ConfigError(f"token id {wrong} in {what} is not in the vocabulary; ids are 0 to {vocabulary - 1}")
    if sampling.min_tokens and len(set(stop_ids(sampling, eos_token_ids))) >= vocabulary:
        raise ConfigError(
            f"min_tokens is {sampling.min_tokens}, and every token of the vocabulary ends a completion, so none may be "
            "the first; leave some out of stop_token_ids"
        )
    total = len(prompt_ids) + sampling.max_tokens
    if total > limits.positions:
        raise ConfigError(
            f"a prompt of {len(prompt_ids)} tokens with max_tokens={sampling.max_tokens} takes {total} positions; "
            f"the model has {limits.positions}. Shorten the prompt or lower max_tokens"
        )
    if isinstance(prompt, ModelInput) and (last := prompt.positions_at(0, total).max()) >= limits.positions:
        raise ConfigError(
            f"a prompt with max_tokens={sampling.max_tokens} reaches position {last}; the model has {limits.positions} "
            "positions, from 0 on. Shorten the prompt or lower max_tokens"
        )
    if total - 1 > limits.cache_tokens:  # the last token is never read
        raise ConfigError(
            f"a prompt of {len(prompt_ids)} tokens with max_tokens={sampling.max_tokens} needs {total - 1} cached "
            f"tokens; the cache holds {limits.cache_tokens}. Raise max_cache_tokens or lower max_tokens"
        )


def one_for_each(
    prompts: Sequence[ModelInput | list[int]], sampling: SamplingParams | list[SamplingParams]
) -> list[SamplingParams]:
    """The sampling parameters of each prompt. Raises `ConfigError` unless there is one for all, or one for each."""
    each = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else sampling
    if not isinstance(each, Sequence) or not all(isinstance(params, SamplingParams) for params in each):
        raise ConfigError(f"sampling is {sampling!r:.60}; it must be SamplingParams, or a list of one for each prompt")
    if len(each) != len(prompts):
        raise ConfigError(f"{len(prompts)} prompts came with {len(each)} sampling parameters; give one, or as many")
    return list(each)


def adapter_for_each(
    prompts: Sequence[ModelInput | list[int]], adapters: str | Sequence[str | None] | None
) -> list[str | None]:
    """The adapter's name of each prompt. Raises `ConfigError` unless there is one for all, or one for each."""
    if adapters is None or isinstance(adapters, str):
        return [adapters] * len(prompts)
    if len(adapters) != len(prompts):
        raise ConfigError(f"{len(prompts)} prompts came with {len(adapters)} adapters; give one, or as many")
    return list(adapters)


def drawn_seed(seed: int, counter: int) -> int:
    """The `counter`-th number, below 2**63, of the random stream of an engine's seed."""
    digest = blake2b(b"%d/%d" % (seed, counter), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
