"""Adapters never leak into each other: each completion among many has the bits of its adapter alone.

    python benchmarks/adapter_leakage.py --adapters 64 --switches 10000

Requests name an adapter at random, or none, while others run; adapters are loaded anew and dropped between steps. Every
completion is compared bit for bit with the one that an engine makes of the same prompt and seed by that adapter alone.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import numpy as np

from rlloop import Engine, SamplingParams, load_model
from rlloop.models import Model, new_model, save_model
from rlloop.models.adapter_files import save_adapter
from rlloop.models.adapter_weights import AdapterWeights, choose_targets, fresh_weights
from rlloop.types import Completion

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 300, "hidden_size": 48,
    "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 256, "tie_word_embeddings": True, "initializer_range": 0.1, "eos_token_id": 2,
}  # fmt: skip
PROMPTS = [list(range(3, 3 + length)) for length in (1, 7, 18, 30)]  # they begin alike: prefixes could be shared


def bits(completion: Completion) -> tuple[list[int], bytes, bytes]:
    return completion.token_ids, completion.logprobs.tobytes(), completion.raw_logprobs.tobytes()


def make_adapters(model: Model, folder: Path, count: int) -> dict[str, Path]:
    """Write adapters of ranks 1 to 16; every third adapts attention alone."""
    made = {}
    for index in range(count):
        chosen = choose_targets(model.adapter_targets(), ["all-linear"] if index % 3 else ["q_proj", "o_proj"])
        fresh = fresh_weights(chosen, 1 + index % 16, 16.0, index)
        rng = np.random.default_rng(index)
        factors = {
            name: (down, up + 0.2 * up.new_tensor(rng.normal(size=up.shape)))
            for name, (down, up) in fresh.factors.items()
        }
        weights = AdapterWeights(factors, fresh.scales, fresh.rank, fresh.alpha)
        save_adapter(model, weights, made.setdefault(f"adapter-{index}", folder / f"adapter-{index}"))
    return made


def run(adapters: int, switches: int, slots: int, device: str = "cpu", seed: int = 0) -> dict[str, float]:
    rng, began = np.random.default_rng(seed), time.perf_counter()
    with tempfile.TemporaryDirectory() as place:
        save_model(new_model(CONFIG, seed=0), Path(place) / "base")
        model = load_model(Path(place) / "base", dtype="float32" if device == "cpu" else "bfloat16", device=device)
        folders = make_adapters(model, Path(place), adapters)
        names: list[str | None] = [None, *folders]
        params = [SamplingParams(max_tokens=4, seed=each, ignore_eos=True) for each in range(2)]
        keys = [(name, prompt, each) for name in names for prompt in range(len(PROMPTS)) for each in range(2)]
        alone: dict[tuple[str | None, int, int], object] = {}
        for name in names:  # one adapter at a time, in an engine of its own
            engine = Engine(model, page_size=4, max_running=4, adapter_slots=slots)
            if name is not None:
                engine.load_adapter(name, folders[name])
            mine = [key for key in keys if key[0] == name]
            made = engine.generate([PROMPTS[p] for _, p, _ in mine], [params[s] for _, _, s in mine], adapters=name)
            alone |= {key: bits(each) for key, each in zip(mine, made, strict=True)}
        engine = Engine(model, page_size=4, max_running=16, max_batch_tokens=64, adapter_slots=slots)
        loaded = set(folders)
        asked: dict[int, tuple[str | None, int, int]] = {}
        wrong = compared = reloads = 0
        while compared < switches:
            while len(asked) < 48:
                key = keys[int(rng.integers(len(keys)))]
                if key[0] is not None and key[0] not in loaded:
                    engine.load_adapter(key[0], folders[key[0]])
                    loaded.add(key[0])
                id = engine.add_request(PROMPTS[key[1]], params[key[2]], adapter=key[0])
                asked[id] = key
            if rng.random() < 0.2:  # drop one, or load it again as another version, while its requests run
                name = str(rng.choice(sorted(folders)))
                if name in loaded and rng.random() < 0.5:
                    engine.drop_adapter(name)
                    loaded.discard(name)
                else:
                    engine.load_adapter(name, folders[name])
                    loaded.add(name)
                reloads += 1
            for id, completion in engine.step():
                wrong += bits(completion) != alone[asked.pop(id)]
                compared += 1
        stats = engine.stats()
        return {
            "adapters": adapters, "slots": slots, "completions": compared, "different": wrong, "reloads": reloads,
            "swaps": stats.adapter_swaps, "swap_seconds": round(stats.adapter_swap_seconds, 3),
            "cached_tokens": stats.cached_tokens, "seconds": round(time.perf_counter() - began, 1),
        }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--adapters", type=int, default=64)
    parser.add_argument("--switches", type=int, default=10_000)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    result = run(options.adapters, options.switches, options.slots, options.device)
    print(json.dumps(result))
    raise SystemExit(result["different"] != 0)


if __name__ == "__main__":
    main()
