"""Bodies of the API's JSON requests, as Tinker's client 0.38 sends them.

Unknown fields are refused, not dropped, so a client newer than the server learns the field's name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np

from rlloop.api.inputs import Chunk as Part
from rlloop.api.inputs import Chunks, InputReader, Picture
from rlloop.api.wire import dense_of
from rlloop.errors import UNREADABLE, ConfigError, readable
from rlloop.training.types import AdamParams, CustomLossGraph, CustomLossInput, CustomLossNode, LoraConfig
from rlloop.training.types import SamplingParams as Sampling
from rlloop.types import ModelInput

T = TypeVar("T")
LONGEST_TTL = 10 * 366 * 86400


class Body(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    type: str | None = None


class CreateSession(Body):
    tags: list[str] = []
    user_metadata: dict[str, Any] | None = None
    sdk_version: str = ""
    project_id: str | None = None
    display_name: str | None = None


class Heartbeat(Body):
    session_id: str


class Lora(Body):
    rank: int
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True

    def config(self) -> LoraConfig | None:
        """None for rank 0, which is full training."""
        if not self.rank:
            return None
        return LoraConfig(self.rank, self.seed, self.train_unembed, self.train_mlp, self.train_attn)


class CreateModel(Body):
    session_id: str
    model_seq_id: int
    base_model: str
    user_metadata: dict[str, Any] | None = None
    lora_config: Lora | None = None
    optimizer_config: dict[str, Any] = {}


class ModelRequest(msgspec.Struct):
    """Fields shared by all commands of a model; the others are read when the command is executed."""

    model_id: str
    seq_id: int


class Adam(Body):
    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0

    def params(self) -> AdamParams:
        return AdamParams(self.learning_rate, self.beta1, self.beta2, self.eps, self.weight_decay, self.grad_clip_norm)


class OptimStep(Body):
    model_id: str
    seq_id: int
    adam_params: Adam | None = None
    optimizer_params: dict[str, Any] | None = None


class SaveWeights(Body):
    model_id: str
    seq_id: int
    path: str | None = None
    ttl_seconds: int | None = None
    overwrite: bool = False
    user_metadata: dict[str, str] | None = None


class SaveForSampler(Body):
    model_id: str
    seq_id: int
    path: str | None = None
    sampling_session_seq_id: int | None = None
    kind: str = "snapshot"
    ttl_seconds: int | None = None
    user_metadata: dict[str, str] | None = None


class SaveExternal(Body):
    model_id: str
    seq_id: int
    path: str
    ttl_seconds: int | None = None
    age_encryption_recipients: list[str] | None = None


class LoadWeights(Body):
    path: str
    optimizer: bool
    model_id: str | None = None
    seq_id: int | None = None
    session_id: str | None = None
    model_seq_id: int | None = None
    base_model: str | None = None
    user_metadata: dict[str, Any] | None = None
    optimizer_config: dict[str, Any] | None = None
    weights_access_token: str | None = None


class CreateSampling(Body):
    session_id: str
    sampling_session_seq_id: int
    base_model: str | None = None
    model_path: str | None = None


class JoinSampling(Body):
    sampling_session_id: str


class Chunk(Body):
    tokens: list[int] | None = None
    data: bytes | None = None  # base64 on the wire
    format: str | None = None
    location: str | None = None
    expected_tokens: int | None = None
    dmel: str | None = None


class Input(Body):
    chunks: list[Chunk] = []

    def read(self, reader: InputReader) -> ModelInput:
        """Raises `ConfigError` for anything but token ids and images that the model can read."""
        return reader.read([Chunks("the prompt", [_chunk(*each) for each in enumerate(self.chunks)])])[0]


def _chunk(index: int, chunk: Chunk) -> Part:
    if chunk.tokens is not None:
        return chunk.tokens
    if chunk.data is not None:
        return Picture(chunk.data, chunk.format or "", chunk.expected_tokens)
    if chunk.location is not None:
        raise ConfigError(
            f"the prompt, chunk {index}, is an image at {chunk.location!r:.80} (image_asset_pointer), and this server "
            "fetches nothing; send the image itself, as an ImageChunk"
        )
    raise ConfigError(f"the prompt, chunk {index}, is of type {chunk.type!r}; this server takes token ids and images")


class Tensor(Body):
    data: list[int | float]
    dtype: str
    shape: list[int] | None = None
    sparse_crow_indices: list[int] | None = None
    sparse_col_indices: list[int] | None = None

    def array(self, where: str, fill: int) -> np.ndarray:
        """Dense; `fill` where a sparse tensor names no value. Raises `ConfigError`."""
        dtype = {"float32": np.float32, "int64": np.int64}.get(self.dtype)
        if dtype is None:
            raise ConfigError(f"{where} has dtype {self.dtype!r}; float32 and int64 are possible")
        try:
            values = np.asarray(self.data, dtype)
            rows, columns = (np.asarray(indices or [], np.int64) for indices in
                             (self.sparse_crow_indices, self.sparse_col_indices))  # fmt: skip
        except OverflowError:
            raise ConfigError(
                f"{where} has a number that does not fit {self.dtype}, or an index beyond int64"
            ) from None
        if self.sparse_crow_indices is not None:
            return dense_of(where, values, rows, columns, shape=self.shape or (), fill=fill)
        try:
            return values if self.shape is None else values.reshape(self.shape)
        except (ValueError, OverflowError):
            raise ConfigError(f"{where} has {values.size} elements, which do not fit its shape {self.shape}") from None


class Params(Body):
    max_tokens: int | None = None
    seed: int | None = None
    stop: str | list[str | int] | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0

    def sampling(self) -> Sampling:
        """Raises `ConfigError` for stops of both kinds."""
        stop: str | list[str] | list[int] | None
        if isinstance(self.stop, list):
            texts, ids = [x for x in self.stop if isinstance(x, str)], [x for x in self.stop if isinstance(x, int)]
            if texts and ids:
                raise ConfigError("sampling_params.stop has both texts and token ids; give one kind")
            stop = texts or ids
        else:
            stop = self.stop
        return Sampling(self.max_tokens, self.seed, stop, self.temperature, self.top_k, self.top_p)


class Sample(Body):
    prompt: Input
    sampling_params: Params
    num_samples: int = 1
    base_model: str | None = None
    model_path: str | None = None
    sampling_session_id: str | None = None
    seq_id: int | None = None
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    target_prompt_logprobs: Tensor | None = None
    prompt_alt_tokens_k: int = 0
    prompt_logprobs_last_n: int | None = None
    record_stability_info: bool | None = None


class LossInput(Body):
    name: str
    rank: int


class Node(Body):
    op: str
    name: str
    target: str
    args: list[Any] = []
    kwargs: dict[str, Any] = {}


class Graph(Body):
    nodes: list[Node]
    format: int = 1


class CreateLoss(Body):
    session_id: str
    custom_loss_seq_id: int
    name: str
    inputs: list[LossInput]
    graph: Graph

    def loss(self) -> tuple[str, Sequence[CustomLossInput], CustomLossGraph]:
        nodes = [CustomLossNode(node.op, node.name, node.target, node.args, node.kwargs) for node in self.graph.nodes]
        inputs = [CustomLossInput(each.name, each.rank) for each in self.inputs]
        return self.name, inputs, CustomLossGraph(nodes, self.graph.format)


class Retrieve(Body):
    request_id: str
    allow_metadata_only: bool = False


class Target(Body):
    sampling_session_id: str
    cloned_sampler_id: int = 0


class RetrieveMany(Body):
    target: Target
    prev_cursor: int = 0
    timeout: float | None = None
    retrieved_request_ids: list[str] = []


class RequestId(Body):
    request_id: str


class ModelId(Body):
    model_id: str


class Path(Body):
    tinker_path: str


class CopyWeights(Body):
    source_path: str
    session_id: str | None = None
    model_seq_id: int | None = None
    destination_project_id: str | None = None
    ttl_seconds: int | None = None
    weights_access_token: str | None = None


class Ttl(Body):
    ttl_seconds: int | None = None


def decoded(body: bytes, kind: type[T]) -> T:
    """A JSON body. Raises `ConfigError`, which says what is wrong and where."""
    try:
        return msgspec.json.decode(body, type=readable(kind))
    except UNREADABLE as error:
        raise ConfigError(f"the request is no {kind.__name__}: {error}") from None


def checked_ttl(ttl_seconds: int | None) -> int | None:
    """Raises `ConfigError` for one out of range."""
    if ttl_seconds is not None and not 1 <= ttl_seconds <= LONGEST_TTL:
        raise ConfigError(f"ttl_seconds is {ttl_seconds}; it must be 1 to {LONGEST_TTL} (10 years), or left out")
    return ttl_seconds
