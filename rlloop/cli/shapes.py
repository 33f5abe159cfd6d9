"""`rlloop shapes`: the catalogue of training shapes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rlloop.cli.parser import new_parser
from rlloop.errors import ConfigError

SHAPES = """\
List training shapes: a model, how it trains (lora, full; reference: scored and sampled only), on which accelerators,
and the memory of one of them, computed from the model's configuration or measured. With an id, one shape in full.
"""

SHAPES_EXAMPLES = """\
examples:
  rlloop shapes
  rlloop shapes qwen3-8b-full --gpus 8
  rlloop shapes mine-lora --file mine.toml
"""


def main(arguments: Sequence[str]) -> int:
    parser = new_parser("shapes", SHAPES, SHAPES_EXAMPLES)
    parser.add_argument("id", nargs="?", metavar="ID", help="one shape, with its memory by part")
    parser.add_argument("--gpus", type=int, metavar="N", help="accelerators to lay it over (default: the shape's)")
    parser.add_argument(
        "--file", type=Path, action="append", default=[], metavar="FILE", help="JSON or TOML with shapes of your own"
    )
    args = parser.parse_args(arguments)
    if args.gpus is not None and args.id is None:
        raise ConfigError("--gpus goes with a shape's id, as in rlloop shapes qwen3-8b-full --gpus 8")

    from rlloop.training.memory import layout_keys
    from rlloop.training.shapes import resolve_training_profile, training_shapes

    if args.id is not None:
        shape = resolve_training_profile(args.id, args.gpus, files=args.file)
        facts = {
            "model": shape.model_name,
            "mode": shape.trainer_mode + (f", rank {shape.lora_rank}" if shape.trainer_mode == "lora" else ""),
            "accelerators": f"{shape.accelerator_count} x {shape.accelerator_type}, {shape.node_count} node(s)",
            "layout": layout_keys(shape.layout),
            "precision": shape.base_model_weight_precision,
            "context": f"{shape.max_supported_context_length} tokens, micro-batches of {shape.max_batch_tokens}",
            f"memory ({shape.memory_source})": f"{shape.total_memory_gib:.1f} of {shape.accelerator_memory_gib:g} GiB: "
            + ", ".join(f"{name} {size:.1f}" for name, size in shape.memory_gib.items()),
        }
        for name, value in facts.items():
            print(f"{name}: {value}")
        return 0
    for shape in training_shapes(args.file):
        where = f"{shape.accelerator_count} x {shape.accelerator_type}"
        memory = f"{shape.total_memory_gib:.1f} of {shape.accelerator_memory_gib:g} GiB {shape.memory_source}"
        print(f"{shape.training_shape:28} {where:24} {layout_keys(shape.layout):32} {memory}")
    return 0
