"""Names of parameters in memory and in checkpoints. Experts are one tensor in memory, and one each in a checkpoint:

model.layers.3.mlp.experts.gate_up_proj  [E, 2F, D]  <->  model.layers.3.mlp.experts.{e}.gate_proj.weight  [F, D]
                                                          model.layers.3.mlp.experts.{e}.up_proj.weight    [F, D]
model.layers.3.mlp.experts.down_proj     [E, D, F]   <->  model.layers.3.mlp.experts.{e}.down_proj.weight  [D, F]
model.layers.3.mixer.experts.up_proj     [E, F, D]   <->  model.layers.3.mixer.experts.{e}.up_proj.weight  [F, D]

`RENAMED` has the families whose checkpoints use other names than the model in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
TOWER = "visual."  # begins the names of a vision tower's weights
GATE_UP, UP, DOWN = ".experts.gate_up_proj", ".experts.up_proj", ".experts.down_proj"

KIMI = "KimiK25ForConditionalGeneration"
SEEING = ("Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration")
# architecture -> (name in memory, name in checkpoints), replaced in this order
RENAMED: dict[str, tuple[tuple[str, str], ...]] = {
    "MiniMaxM2ForCausalLM": (
        (".mlp.gate.e_score", ".mlp.e_score"),
        (".mlp.", ".block_sparse_moe."),
        (".gate_proj.", ".w1."),
        (".down_proj.", ".w2."),
        (".up_proj.", ".w3."),
    ),
    "NemotronHForCausalLM": (
        ("model.embed_tokens.", "backbone.embeddings."),
        ("model.norm.", "backbone.norm_f."),
        ("model.", "backbone."),
    ),
    "GptOssForCausalLM": ((".mlp.gate.", ".mlp.router."),),
    **dict.fromkeys(SEEING, (("model.", "model.language_model."), (TOWER, f"model.{TOWER}"))),
    KIMI: (("model.", "language_model.model."), ("lm_head.", "language_model.lm_head.")),
}
# Likewise for the modules of transformers' model (version 5), where they have other names than in memory.
MODULES = {**{name: RENAMED[name] for name in SEEING}, KIMI: (("model.", "model.language_model."),)}
# How checkpoints hold experts, where not one by one (`split`): `stacked`, all in one tensor, as memory does, or
# `transposed`, each matrix of it the other way round. The first form is written where there is no source.
FORMS = {
    "GptOssForCausalLM": ("stacked",),
    # transformers', the released bfloat16 files', and that of packed weights
    "Qwen3VLMoeForConditionalGeneration": ("stacked", "transposed", "split"),
    "Qwen3_5MoeForConditionalGeneration": ("split", "stacked"),
}


@dataclass(frozen=True)
class StoredSlice:
    """The part of a parameter that one stored tensor holds: all of it, or rows `begin` to `end` of one expert.

    `transposed`: all of it, each expert's matrix the other way round.
    """

    parameter: str
    expert: int | None = None
    begin: int = 0
    end: int = 0
    transposed: bool = False

    def of(self, parameter: Tensor) -> Tensor:
        """A view of it."""
        if self.transposed:
            return parameter.mT
        return parameter if self.expert is None else parameter[self.expert, self.begin : self.end]


def stored_name(name: str, architecture: str) -> str:
    """A parameter's name in checkpoints; experts apart."""
    return _renamed(name, RENAMED.get(architecture, ()))


def module_name(name: str, architecture: str) -> str:
    """A module's or parameter's name in transformers' model (version 5), and so in PEFT's folders."""
    return _renamed(f"{name}.", MODULES.get(architecture, ())).removesuffix(".")


def _renamed(name: str, pairs: tuple[tuple[str, str], ...]) -> str:
    for ours, theirs in pairs:
        name = name.replace(ours, theirs)
    return name


def module_names(name: str, architecture: str) -> tuple[str, ...]:
    """`module_name`, and the names that it has in checkpoints and so in older versions of transformers."""
    theirs = module_name(name, architecture)
    stored = stored_name(f"{name}.", architecture).removesuffix(".")
    return (theirs,) if stored == theirs else (theirs, stored)


def stored_slices(
    shapes: Mapping[str, tuple[int, ...]], architecture: str, form: str | None = None
) -> Iterator[tuple[str, StoredSlice, tuple[int, ...]]]:
    """(stored name, slice, its shape) of every stored tensor, for parameters of these shapes.

    `form`: how experts are stored (`form_of`); None: as checkpoints of the architecture are written.
    """
    form = form or FORMS.get(architecture, ("split",))[0]
    for name, slice_, shape in _split_experts(shapes) if form == "split" else _stacked(shapes, form == "transposed"):
        yield stored_name(name, architecture), slice_, shape


def form_of(
    checkpoint_shapes: Mapping[str, tuple[int, ...]], shapes: Mapping[str, tuple[int, ...]], architecture: str
) -> str | None:
    """The form in which a checkpoint with tensors of these shapes holds its experts; None: the default."""
    for form in FORMS.get(architecture, ()):
        experts = {name: shape for name, shape in shapes.items() if name.endswith((GATE_UP, UP, DOWN))}
        if (
            stored_shapes(experts, architecture, form).items()
            <= {k: tuple(v) for k, v in checkpoint_shapes.items()}.items()
        ):
            return form
    return None


def _stacked(
    shapes: Mapping[str, tuple[int, ...]], transposed: bool
) -> Iterator[tuple[str, StoredSlice, tuple[int, ...]]]:
    for name, shape in shapes.items():
        turned = transposed and name.endswith((GATE_UP, UP, DOWN))
        yield name, StoredSlice(name, transposed=turned), (*shape[:-2], *shape[:-3:-1]) if turned else shape


def _split_experts(shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, StoredSlice, tuple[int, ...]]]:
    for name, shape in shapes.items():
        if name.endswith((GATE_UP, UP, DOWN)):
            layer, kind = name.rsplit(".", 1)
            count, rows, width = shape
            matrices = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
            size = rows // len(matrices)
            for expert in range(count):
                for index, matrix in enumerate(matrices):
                    rows_of = StoredSlice(name, expert, index * size, (index + 1) * size)
                    yield f"{layer}.{expert}.{matrix}.weight", rows_of, (size, width)
        else:
            yield name, StoredSlice(name), shape


def stored_shapes(
    shapes: Mapping[str, tuple[int, ...]], architecture: str, form: str | None = None
) -> dict[str, tuple[int, ...]]:
    return {name: shape for name, _, shape in stored_slices(shapes, architecture, form)}


def shapes_in_any_form(shapes: Mapping[str, tuple[int, ...]], architecture: str) -> dict[str, tuple[int, ...]]:
    """Shapes by stored name in every form of the architecture; where two share a name, the earlier form's."""
    forms = FORMS.get(architecture, ("split",))
    return {k: shape for form in reversed(forms) for k, shape in stored_shapes(shapes, architecture, form).items()}


def stored_state(state: Mapping[str, Tensor], architecture: str, form: str | None = None) -> dict[str, Tensor]:
    """A state by parameter name under the names of checkpoints, which other engines use too; views, not copies."""
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    return {name: rows.of(state[rows.parameter]) for name, rows, _ in stored_slices(shapes, architecture, form)}
