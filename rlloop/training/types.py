"""Data types of the training API, with Tinker's names where the meaning is the same: dataclasses over numpy arrays.

Numbers of a datum are numpy arrays of float32 or int64; torch tensors, lists and Tinker's own `TensorData` are taken
wherever one is (`array_of`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from rlloop.errors import ConfigError
from rlloop.types import ModelInput

Parity = Literal["require", "observe"]
CheckpointType = Literal["training", "sampler"]
StopReason = Literal["stop", "length"]
CHECKED, DIFFERENT, LOSS = "parity/tokens_checked:sum", "parity/tokens_different:sum", "loss:sum"
EMPTY_LOGPROB = -99999.0  # of cells without a token in `TopkLogprobs`


def array_of(name: str, value: Any) -> np.ndarray:
    """A number, list, array, tensor or Tinker's `TensorData` as float32 or int64.

    Raises `ConfigError` for anything else, and for ragged lists.
    """
    if hasattr(value, "to_numpy"):
        value = value.to_numpy()
    elif hasattr(value, "detach"):
        value = value.detach().cpu()
        value = (value.float() if value.is_floating_point() else value).numpy()
    try:
        array = np.asarray(value)
    except ValueError:
        array = np.empty(0, object)
    if array.dtype.kind not in "fiub":
        raise ConfigError(
            f"{name} is {value!r:.60}; it must be an array of numbers, float32 or int64, rectangular if it is nested"
        )
    return array.astype(np.float32 if array.dtype.kind == "f" else np.int64, copy=False)


@dataclass(frozen=True, kw_only=True)
class PromptProvenanceSpan:
    """`length` consecutive positions of a datum that are positions [offset, offset + length) of the prompt that a
    sampled sequence continued."""

    sequence_id: str
    offset: int = 0
    length: int

    def __post_init__(self) -> None:
        _check_span(self.sequence_id, self.offset, self.length)


@dataclass(frozen=True, kw_only=True)
class SampledProvenanceSpan:
    """`length` consecutive positions of a datum that are tokens [offset, offset + length) of a sampled sequence."""

    sequence_id: str
    offset: int = 0
    length: int

    def __post_init__(self) -> None:
        _check_span(self.sequence_id, self.offset, self.length)


def _check_span(sequence_id: str, offset: int, length: int) -> None:
    if not sequence_id:
        raise ConfigError("a provenance span's sequence_id is empty; it is the id of a sampled sequence")
    if offset < 0 or length < 0:
        raise ConfigError(f"a provenance span has offset {offset} and length {length}; both must be at least 0")


Spans = tuple[PromptProvenanceSpan | SampledProvenanceSpan, ...]


@dataclass(frozen=True)
class Provenance:
    """Origin of a datum's tokens: consecutive spans that cover the input, and the rows of the loss."""

    model_input: Spans  # lengths add up to the input's
    loss_fn_inputs: Spans  # lengths add up to those of target_tokens


@dataclass(frozen=True)
class Datum:
    """One sequence to train: position i of `model_input` [N] predicts row i of `loss_fn_inputs["target_tokens"]`.

    Example: tokens [5, 6, 7, 8] of which 7 and 8 are trained: `Datum(ModelInput.from_ids([5, 6, 7]),
    {"target_tokens": [6, 7, 8], "weights": [0.0, 1.0, 1.0]})`.
    """

    model_input: ModelInput  # [N] tokens
    loss_fn_inputs: Mapping[str, Any] = field(default_factory=dict)  # arrays [N] or [N, K], by name
    provenance: Provenance | None = None

    def __post_init__(self) -> None:
        inputs = {name: array_of(f"loss_fn_inputs[{name!r}]", value) for name, value in self.loss_fn_inputs.items()}
        object.__setattr__(self, "loss_fn_inputs", inputs)

    def with_provenance(
        self,
        model_input: Sequence[PromptProvenanceSpan | SampledProvenanceSpan],
        loss_fn_inputs: Sequence[PromptProvenanceSpan | SampledProvenanceSpan],
    ) -> Datum:
        """A copy that names the sampled sequences behind its tokens. The service checks that the spans fit."""
        return replace(self, provenance=Provenance(tuple(model_input), tuple(loss_fn_inputs)))


@dataclass(frozen=True)
class LoraConfig:
    """A low-rank adapter that trains over the frozen base. B is 0 at first; scale = alpha / rank."""

    rank: int = 32
    seed: int | None = None  # of A; None: the service's rule (see `TrainingService.create_model`)
    train_unembed: bool = True
    train_mlp: bool = True  # routed and shared experts among them
    train_attn: bool = True  # recurrent layers among them
    alpha: float = 32.0


@dataclass(frozen=True)
class AdamParams:
    """AdamW's settings of one step."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0  # decoupled; norms and biases have none
    grad_clip_norm: float = 0.0  # global norm; 0: not clipped


@dataclass(frozen=True)
class SamplingParams:
    """Settings of a sample, as Tinker has them; `rlloop.SamplingParams` are an engine's."""

    max_tokens: int | None = None  # None: what is left of the context
    seed: int | None = None  # None: derived from the request's name; sample i > 0 of a request has one derived from it
    # Text, texts or token ids that end a completion beside the model's end of sequence, the last token included. None:
    # the end of sequence alone; an empty list: nothing, not even that. Texts need a tokenizer in the base's folder.
    stop: str | Sequence[str] | Sequence[int] | None = None
    temperature: float = 1.0  # 0: greedy
    top_k: int = -1  # -1: off
    top_p: float = 1.0


@dataclass(frozen=True)
class TopkLogprobs:
    """The k likeliest tokens of each of T positions; empty cells have token 0 and logprob `EMPTY_LOGPROB`."""

    token_ids: np.ndarray  # [T, k] int32
    logprobs: np.ndarray  # [T, k] float32


@dataclass(frozen=True)
class PromptAltTokens:
    """Independent draws from the model's distribution at each position of a prompt but the first."""

    tokens: np.ndarray  # [P - 1, k] int64
    logprobs: np.ndarray  # [P - 1, k] float32


@dataclass(frozen=True)
class SampledSequence:
    """One completion."""

    stop_reason: StopReason
    sequence_id: str  # names it in a datum's provenance
    tokens: list[int]  # [T]
    logprobs: np.ndarray  # [T] float32, of the distribution sampled from
    topk_logprobs: TopkLogprobs | None = None
    raw_logprobs: np.ndarray | None = None  # [T] float32, at temperature 1 without truncation: what is compared


@dataclass(frozen=True)
class SampleResponse:
    """The completions of one request, and what was asked about its prompt of P tokens."""

    sequences: list[SampledSequence]
    prompt_logprobs: np.ndarray | None = None  # [P] float32, NaN where none was computed: at the first token
    topk_prompt_logprobs: TopkLogprobs | None = None  # [P, k]
    target_prompt_logprobs: np.ndarray | None = None  # [P - 1, K] float32; 0 where the request had -1
    prompt_cache_hit_tokens: int = 0
    prompt_alt_tokens: PromptAltTokens | None = None


@dataclass(frozen=True)
class ForwardBackwardOutput:
    """The results of `forward` and `forward_backward`.

    `metrics`' names end in their reduction over the parts of a call, `:sum` or `:mean`: `loss:sum`,
    `parity/tokens_checked:sum`, `parity/tokens_different:sum`, and a custom loss's own.
    """

    loss_fn_outputs: list[dict[str, np.ndarray]]  # by datum: "logprobs" [N] or [N, K] float32 of target_tokens
    metrics: dict[str, float]
    loss_fn_output_type: str = "ArrayRecord"


@dataclass(frozen=True)
class OptimStepResponse:
    """`metrics`: `optim/grad_norm` (before clipping), `optim/lr`, and loads of experts."""

    metrics: dict[str, float]


@dataclass(frozen=True)
class SaveWeightsResponse:
    path: str


@dataclass(frozen=True)
class SaveWeightsForSamplerResponse:
    """`sampler` is what `TrainingService.sample` takes; `path`: of a checkpoint, where one was asked for by name."""

    sampler: str
    path: str | None = None


@dataclass(frozen=True)
class LoadWeightsResponse:
    path: str
    model_id: str


@dataclass(frozen=True)
class ModelData:
    arch: str
    model_name: str
    tokenizer_id: str | None  # the base's folder, where it has a tokenizer


@dataclass(frozen=True)
class GetInfoResponse:
    """A model that trains."""

    model_id: str
    model_data: ModelData
    is_lora: bool
    lora_rank: int | None  # None: full training
    lora: LoraConfig | None = None
    parity: Parity = "require"
    user_metadata: Mapping[str, str] = field(default_factory=dict)
    updates: int = 0  # optimizer steps since it was created

    @property
    def model_name(self) -> str:
        return self.model_data.model_name


@dataclass(frozen=True)
class SupportedModel:
    model_name: str
    max_context_length: int
    trainable: bool = True
    sampleable: bool = True


@dataclass(frozen=True)
class GetServerCapabilitiesResponse:
    supported_models: list[SupportedModel]


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk. Its path is `tinker://MODEL_ID/weights/NAME` or `tinker://MODEL_ID/sampler_weights/NAME`."""

    checkpoint_id: str  # weights/NAME or sampler_weights/NAME
    checkpoint_type: CheckpointType
    time: float  # seconds since 1970
    tinker_path: str
    size_bytes: int
    is_lora: bool
    lora: LoraConfig | None
    user_metadata: dict[str, str] | None = None
    expires_at: float | None = None  # None: never


@dataclass(frozen=True)
class CustomLossInput:
    """One input of a custom loss: `logprobs`, or a key of `loss_fn_inputs`, and its number of dimensions, 0 to 2."""

    name: str
    rank: int


@dataclass(frozen=True)
class CustomLossNode:
    """One operation of a custom loss, as torch.fx records it, with arguments encoded as JSON values.

    Scalars, texts and lists stand for themselves. Anything else is an object of one key: `{"ref": name}` for another
    node, `{"tuple": [...]}`, `{"dict": {...}}`, `{"slice": [start, stop, step]}`, `{"ellipsis": true}`,
    `{"float": "inf"}`, `{"dtype": "float32"}`, and of `device`, `layout` and `memory_format`.
    """

    op: str  # placeholder, call_function, call_method or output
    name: str
    target: str  # torch.exp, operator.mul, a method's name, ...
    args: list[Any] = field(default_factory=list)
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class CustomLossGraph:
    """A custom loss as data: its nodes in the order of execution."""

    nodes: list[CustomLossNode]
    format: int = 1
