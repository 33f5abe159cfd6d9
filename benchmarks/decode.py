"""Tokens per second of sampling, on a 3M-parameter float32 Qwen3: 256 distinct prompts of 12 to 20 tokens, 64 new each.

    python benchmarks/decode.py            # the engine, and transformers' generate
    python benchmarks/decode.py --quick    # 32 requests of 16 tokens, one round, nothing recorded

The engine keeps every parity guarantee and returns logprobs; transformers decodes the same prompts as one padded batch
with its key-value cache, with logprobs (from its scores, as its own `compute_transition_scores` makes them) and
without. After a warm-up the three take turns, five rounds each.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from results_schema import Figure, report

import rlloop
from rlloop.models import Model, new_model, save_model

VOCABULARY = 512
PEERS = {  # name -> (returns logprobs, the aim)
    "transformers generate with logprobs": (True, 1.2),
    "transformers generate": (False, None),
}
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}


def prompts_of(count: int) -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(3, VOCABULARY, rng.integers(12, 21)).tolist() for _ in range(count)]


def engine_runner(model: Model, prompts: list[list[int]], new_tokens: int) -> Callable[[], None]:
    engine = rlloop.Engine(model, prefix_caching=False)
    sampling = [rlloop.SamplingParams(new_tokens, seed=i, ignore_eos=True) for i in range(len(prompts))]

    def run() -> None:
        completions = engine.generate(prompts, sampling)
        assert all(len(completion.token_ids) == new_tokens for completion in completions)

    return run


def transformers_runner(folder: Path, prompts: list[list[int]], new_tokens: int, logprobs: bool) -> Callable[[], None]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])

    def run() -> None:
        out: Any = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            use_cache=True,
            pad_token_id=0,
            eos_token_id=None,
            return_dict_in_generate=True,
            output_scores=logprobs,
        )
        assert out.sequences.shape == (len(prompts), width + new_tokens)
        if logprobs:
            made = model.compute_transition_scores(out.sequences, out.scores, normalize_logits=True)
            assert made.shape == (len(prompts), new_tokens)

    return run


def tokens_per_second(runners: dict[str, Callable[[], None]], tokens: int, rounds: int) -> dict[str, list[float]]:
    """Tokens per second of each round after a warm-up. Runners take turns."""
    times: dict[str, list[float]] = {name: [] for name in runners}
    for index in range(rounds + 1):
        for name, run in runners.items():
            begin = time.perf_counter()
            run()
            seconds = time.perf_counter() - begin
            print(
                f"{name}, {'round ' + str(index) if index else 'warm-up'}: {seconds:.2f} s", file=sys.stderr, flush=True
            )
            if index:
                times[name].append(seconds)
    return {name: [tokens / seconds for seconds in each] for name, each in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small run that records nothing")
    arguments = parser.parse_args()
    count, new_tokens, rounds = (32, 16, 1) if arguments.quick else (256, 64, 5)
    prompts = prompts_of(count)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_model(new_model(CONFIG, seed=0), folder)
        runners = {
            "rlloop": engine_runner(rlloop.load_model(folder), prompts, new_tokens),
            **{
                peer: transformers_runner(folder, prompts, new_tokens, logprobs)
                for peer, (logprobs, _) in PEERS.items()
            },
        }
        speed = tokens_per_second(runners, count * new_tokens, rounds)
    work = f"decode, {count} x {new_tokens} tokens, Qwen3 3M float32"
    figures = [
        Figure.of_rounds(work, "tokens/s", speed["rlloop"], peer, speed[peer], aim=aim)
        for peer, (_, aim) in PEERS.items()
    ]
    report("decode", figures, packages=("transformers",), write=not arguments.quick)


if __name__ == "__main__":
    main()
