"""Training on several ranks, whose results must be those of one rank: run by `run_ranks`."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from rlloop.algorithms import LossBatch, LossOutput, get_loss
from rlloop.config.trainer import TrainerConfig
from rlloop.metrics import is_timing
from rlloop.models import Model, new_model, row_blocks
from rlloop.models.adapter_weights import Adapter, choose_targets, fresh_weights
from rlloop.models.row_blocks import ROWS
from rlloop.parallel import collectives
from rlloop.parallel.collectives import SMALL
from rlloop.parallel.context import join
from rlloop.parallel.layout import Layout
from rlloop.trainer import Trainer, TrainSequence
from tests.support.train_sequences import VOCAB, make_batch, make_groups

DENSE = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": VOCAB, "hidden_size": 24,
    "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
    "max_position_embeddings": 64, "tie_word_embeddings": True, "initializer_range": 0.2, "eos_token_id": 0,
}  # fmt: skip
MIXTURE = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "vocab_size": VOCAB, "hidden_size": 24,
    "intermediate_size": 40, "moe_intermediate_size": 12, "num_hidden_layers": 2, "first_k_dense_replace": 1,
    "num_attention_heads": 2, "n_routed_experts": 7, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    "q_lora_rank": None, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
    "max_position_embeddings": 64, "initializer_range": 0.2, "eos_token_id": 0,
}  # fmt: skip
INDEXED = {  # whose indexer has no gradient
    **MIXTURE, "architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32", "q_lora_rank": 12,
    "index_topk": 6, "index_head_dim": 16, "index_n_heads": 4,
}  # fmt: skip
DELTA = {  # a gated delta network below attention
    **DENSE, "architectures": ["Qwen3_5MoeForCausalLM"], "model_type": "qwen3_5_moe_text", "tie_word_embeddings": False,
    "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 6, "linear_value_head_dim": 10, "num_experts": 5, "num_experts_per_tok": 2,
    "moe_intermediate_size": 12, "shared_expert_intermediate_size": 10,
}  # fmt: skip
MAMBA = {  # Mamba-2 in each half of the layers
    **DENSE, "architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h", "tie_word_embeddings": False,
    "num_hidden_layers": 4, "layers_block_type": ["linear_attention", "moe", "linear_attention", "full_attention"],
    "mamba_num_heads": 4, "mamba_head_dim": 10, "n_groups": 2, "ssm_state_size": 6, "n_routed_experts": 5,
    "moe_intermediate_size": 12, "moe_shared_expert_intermediate_size": 10, "moe_latent_size": 16,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, its type, settings of the trainer, and the number of updates; one of them is refused."""

    model: dict[str, Any]
    dtype: str = "float32"
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    steps: int = 3
    reference: bool = False
    custom: bool = False
    adapter: tuple[str, ...] = ()  # its targets
    quantize: str = "none"
    groups: bool = False  # whose sequences have prompts in common
    pictures: bool = False  # in some of the sequences


CASES = {
    "dense": Case(DENSE),
    "dense bfloat16": Case(DENSE, "bfloat16"),
    "untied": Case(
        {**DENSE, "tie_word_embeddings": False},
        "bfloat16",
        {"checkpoint_layers": "all", "checkpoint_keep_attention": True},
    ),
    "reference": Case({**DENSE, "tie_word_embeddings": False}, settings={"checkpoint_layers": "all"}, reference=True),
    "custom": Case(DENSE, "bfloat16", custom=True),
    "experts": Case(MIXTURE, settings={"balance_coef": 0.1, "expert_bias_rate": 0.01}),
    "experts bfloat16": Case(
        MIXTURE, "bfloat16", {"balance_coef": 0.1, "expert_bias_rate": 0.01, "checkpoint_layers": "all"}
    ),
    "indexer": Case(INDEXED, "bfloat16", {"weight_decay": 0.1}),
    "delta": Case(DELTA, "bfloat16", {"balance_coef": 0.1}),
    "mamba": Case(MAMBA, "bfloat16", {"expert_bias_rate": 0.01, "checkpoint_layers": "all"}),
    "fp8": Case(DENSE, "bfloat16", quantize="fp8"),
    "shared prompts": Case(
        {**DENSE, "max_position_embeddings": 128},
        "bfloat16",
        {"share_prompts": True, "max_batch_tokens": 150},
        groups=True,
    ),
    "adapter": Case(MIXTURE, adapter=("all-linear", "lm_head"), reference=True),
    "adapter bfloat16": Case(DENSE, "bfloat16", {"checkpoint_layers": "all"}, adapter=("all-linear",)),
}
FEW = ("dense bfloat16", "untied", "experts", "custom", "adapter bfloat16")
UNPACKED = tuple(name for name, case in CASES.items() if case.quantize == "none")
PLAIN = ("dense bfloat16", "experts")
# By number of ranks: layouts, each with its cases. All cases train where optimizer states are sharded, evenly, and
# where parameters are, unevenly; the others differ from those two by what few cases reach.
# layers: shard=parameters; offload: as far as can be; small: bytes of a tensor that travels with others; rows: of a
# block of an MLP
LAYOUTS: dict[int, list[tuple[dict[str, int], tuple[str, ...]]]] = {
    1: [({}, tuple(CASES))],
    2: [({"dp_replicate": 2}, PLAIN), ({"dp_shard": 2}, tuple(CASES))],
    3: [({"dp_shard": 3, "small": 512, "offload": 1}, FEW), ({"dp_shard": 3, "layers": 1, "offload": 1}, UNPACKED)],
    4: [
        ({"dp_shard": 2, "dp_replicate": 2, "layers": 1, "small": 0}, PLAIN),
        ({"dp_shard": 2, "dp_replicate": 2}, FEW),
    ],
}


def ranked(case: Case, layout: dict[str, int], device: str = "cpu") -> Trainer:
    """A trainer of this process's rank."""
    degrees = {axis: degree for axis, degree in layout.items() if axis not in ("layers", "offload", "small", "rows")}
    collectives.SMALL, row_blocks.ROWS = layout.get("small", SMALL), layout.get("rows", ROWS)
    context = join(torch.device(device), Layout(**degrees))

    def model() -> Model:
        return new_model(case.model, seed=0, dtype=case.dtype, context=context, quantize=case.quantize)

    policy = model()
    if case.adapter:
        targets = choose_targets(policy.requires_grad_(False).adapter_targets(), case.adapter)
        policy = policy.with_adapter(Adapter(fresh_weights(targets, 3, 6.0, seed=1), targets))
    reference = policy.with_adapter(None) if case.adapter else model()

    settings = {"lr": 1e-2, "grad_clip": 0.5, "max_batch_tokens": 30, "weight_decay": 0.01, **case.settings}
    settings["shard"] = "parameters" if "layers" in layout else "optimizer"
    if "offload" in layout:
        settings["offload"] = "moments" if case.dtype == "float32" else "masters"
    return Trainer(policy, TrainerConfig(**settings), reference=reference if case.reference else None)


def go(trainer: Trainer, case: Case, steps: Sequence[int]) -> Iterator[Any]:
    """Everything that training reports. Ragged batches; two of them in every third update; one update refused."""
    loss = get_loss("grpo", kl_coef=0.1) if case.reference else get_loss("grpo")

    def explodes(batch: LossBatch) -> LossOutput:
        out = loss(batch)
        return dataclasses.replace(out, loss=out.loss * torch.inf)

    for step in steps:
        for part in range(2 if step % 3 == 2 else 1):
            seed = 10 * step + part
            batch = _batch(case, 5 + (step + part) % 4, seed)
            run = trainer.forward_backward_custom if case.custom else trainer.forward_backward
            result = run(batch, explodes if step == 1 else loss)
            metrics = {name: value.value for name, value in result.metrics.items()}
            yield [each.tobytes() for each in result.logprobs], result.micro_batches, metrics, trainer.routing()
            raw = result.recomputed.raw_logprobs
            yield None if raw is None else [each.tobytes() for each in raw]
        yield trainer.optim_step()
    yield [each.tobytes() for each in trainer.logprobs(_batch(case, 9, 99))]


def _batch(case: Case, count: int, seed: int) -> list[TrainSequence]:
    if not case.pictures:
        return make_groups(seed=seed) if case.groups else make_batch(count, seed)
    from tests.support.image_models import make_picture_batch  # imports transformers

    return make_picture_batch(count, seed)


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def everything(
    folder: Path, layouts: Iterable[tuple[dict[str, int], Sequence[str]]]
) -> dict[str, tuple[str, dict[str, str], str]]:
    """By case and layout: digests of all that is reported, of the folder that is saved, and of the live weights."""
    found = {}
    for layout, names in layouts:
        for name in names:
            trainer = ranked(CASES[name], layout)
            reported = list(go(trainer, CASES[name], range(CASES[name].steps)))
            saved = save(trainer, folder / f"{name} {layout}")
            found[f"{name} {layout}"] = (digests_of(reported), saved, live(trainer))
    return found


def live(trainer: Trainer) -> str:
    """The digest of the weights that an engine would read."""
    digest = hashlib.sha256()
    for _, weight in trainer.compute_copy():
        digest.update(weight.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def save(trainer: Trainer, folder: Path) -> dict[str, str]:
    """The digests of what a trainer saves, on each rank."""
    folder.mkdir(exist_ok=True, parents=True)
    trainer.save(folder)
    world = trainer.model.context.ranks("world")
    return world.broadcast_object(digests(folder) if world.rank == 0 else None)


def around_a_checkpoint(case: Case, layout: dict[str, int], folder: Path) -> tuple[Any, ...]:
    """Digests of what two updates report, of the checkpoint between them in `folder`, and of the live weights."""
    trainer = ranked(case, layout)
    first = digests_of(go(trainer, case, [0]))
    saved = save(trainer, folder)
    return first, saved, digests_of(go(trainer, case, [2])), live(trainer)


def after_the_checkpoint(case: Case, layout: dict[str, int], folder: Path) -> tuple[Any, ...]:
    """The second of `around_a_checkpoint`'s updates, by another trainer, which restores `folder`."""
    trainer = ranked(case, layout)
    trainer.restore(folder)
    return digests_of(go(trainer, case, [2])), live(trainer)


def relay(
    folder: Path, cases: Sequence[str], layout: dict[str, int], begin: int, end: int
) -> list[tuple[str, dict[str, str]]]:
    """Train from step `begin` (restored, if above 0) up to `end`, and save."""
    found = []
    for name in cases:
        trainer = ranked(CASES[name], layout)
        if begin:
            trainer.restore(folder / f"{name} {begin}")
        reported = list(go(trainer, CASES[name], range(begin, end)))
        found.append((digests_of(reported[-1:]), save(trainer, folder / f"{name} {end}")))
    return found


def digests_of(reported: Iterable[Any]) -> str:
    """A digest of what `go` yields: bytes and numbers, NaN among them; times differ."""
    return hashlib.sha256("\n".join(repr(_without_times(each)) for each in reported).encode()).hexdigest()


def _without_times(item: Any) -> Any:
    if isinstance(item, dict):
        return {name: value for name, value in item.items() if not is_timing(name)}
    return tuple(map(_without_times, item)) if isinstance(item, tuple) else item
