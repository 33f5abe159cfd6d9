"""Upper bounds on an engine's or a trainer's tokens per second, by the device's memory bandwidth and arithmetic.

An engine's prompts are bound by arithmetic: their operations by the peak rate. A step of decoding is bound by memory:
it reads all weights once (of a mixture, the experts that its tokens go to, if they choose evenly), and the keys and
values of every request. Everything else counts as free, so that real engines are below it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

DEVICES = {  # part of its name -> (bytes a second, dense bfloat16 operations a second), by its data sheet
    "H200": (4.8e12, 989e12), "H100 80GB HBM3": (3.35e12, 989e12), "A100-SXM4-80GB": (2.039e12, 312e12),
}  # fmt: skip
BYTES = 2  # of a number


def device_rates(name: str) -> tuple[float, float] | None:
    return next((rates for part, rates in DEVICES.items() if part in name), None)


def layer_numbers(config: Mapping[str, Any], tokens: int) -> float:
    """Weights of one layer that a step of so many tokens reads."""
    hidden, width = config["hidden_size"], config["head_dim"]
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    attention = hidden * width * (2 * heads + 2 * groups)
    if "num_experts" not in config:
        return attention + 3 * hidden * config["intermediate_size"]
    experts = config["num_experts"]
    touched = experts * (1 - (1 - config["num_experts_per_tok"] / experts) ** tokens)
    return attention + hidden * experts + touched * 3 * hidden * config["moe_intermediate_size"]


def total_bytes(config: Mapping[str, Any]) -> float:
    """Bytes of all weights."""
    tables = 1 if config["tie_word_embeddings"] else 2
    everything = config["num_hidden_layers"] * layer_numbers(config, 1 << 30)
    return BYTES * (everything + tables * config["vocab_size"] * config["hidden_size"])


def token_bytes(config: Mapping[str, Any]) -> int:
    """Bytes of one token's keys and values."""
    return BYTES * 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]


def step_bytes(config: Mapping[str, Any], contexts: Sequence[int]) -> float:
    """Read by one step that decodes a token of each context."""
    weights = config["num_hidden_layers"] * layer_numbers(config, len(contexts))
    head = config["vocab_size"] * config["hidden_size"]
    return BYTES * (weights + head) + token_bytes(config) * sum(contexts)


def prompt_operations(config: Mapping[str, Any], length: int) -> float:
    """Multiplications and additions: products, and attention of each token to those before it."""
    wide = config["num_attention_heads"] * config["head_dim"]
    products = 2 * length * layer_numbers(config, 1)  # a token's own experts
    return config["num_hidden_layers"] * (products + 2 * wide * length**2)


def engine_speed(
    config: Mapping[str, Any], requests: Sequence[tuple[int, int]], shared: int, rates: tuple[float, float]
) -> float:
    """New tokens per second of (prompt length, new tokens) all begun at once, if `shared` requests in a row have one
    prompt, which is computed once. The first token of each comes with its prompt."""
    bandwidth, arithmetic = rates
    seconds = sum(prompt_operations(config, length) for length, _ in requests[::shared]) / arithmetic
    for step in range(1, max(new for _, new in requests)):
        contexts = [length + step for length, new in requests if new > step]
        seconds += step_bytes(config, contexts) / bandwidth
    return sum(new for _, new in requests) / seconds


def train_speed(config: Mapping[str, Any], sequences: Sequence[tuple[int, int]], arithmetic: float) -> float:
    """Tokens per second of forward and backward, three forwards' operations, over (length, tokens with logits)."""
    head = 2 * config["vocab_size"] * config["hidden_size"]
    operations = sum(prompt_operations(config, length) + head * scored for length, scored in sequences)
    return sum(length for length, _ in sequences) / (3 * operations / arithmetic)
