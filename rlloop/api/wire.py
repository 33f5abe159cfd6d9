"""Converts the API's binary messages to the training service's types, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import zstandard

from rlloop.api.inputs import TEXT_ONLY, Chunk, Chunks, InputReader, Picture
from rlloop.api.schema import message
from rlloop.errors import ConfigError
from rlloop.training.types import (
    Datum,
    ForwardBackwardOutput,
    PromptAltTokens,
    PromptProvenanceSpan,
    Provenance,
    SampledProvenanceSpan,
    SampleResponse,
    Spans,
    TopkLogprobs,
)
from rlloop.types import ModelInput

DTYPES = {1: np.dtype("<f4"), 2: np.dtype("<i8"), 3: np.dtype("<i4")}
NUMBERS = {dtype: number for number, dtype in DTYPES.items()}
PIECE = 1024  # bytes unpacked at a time, of which each 4 can be a block of 128 KiB
STOP_REASONS = {"stop": 0, "length": 1}

_Request = message("ForwardBackwardRequest")
_Output = message("ForwardBackwardOutput")
_Sample = message("SampleResponse")


@dataclass(frozen=True)
class ForwardBackward:
    model_id: str
    seq_id: int
    data: list[Datum]
    loss_fn: str
    loss_fn_config: dict[str, float | str]
    forward_only: bool


def unpacked(body: bytes, coding: str, most: int) -> bytes:
    """A body as its Content-Encoding says, of at most `most` bytes. Raises `ConfigError`."""
    if coding in ("", "identity"):
        return body
    if coding != "zstd":
        raise ConfigError(f"the request is encoded as {coding!r}; identity and zstd are understood")
    content, at, frame = bytearray(), 0, zstandard.ZstdDecompressor().decompressobj()
    try:
        while at < len(body) and len(content) <= most:
            if frame.eof:
                frame = zstandard.ZstdDecompressor().decompressobj()
            piece = body[at : at + PIECE]
            content += frame.decompress(piece)
            at += len(piece) - len(frame.unused_data)
    except zstandard.ZstdError as error:
        raise ConfigError(f"the request is not zstd, which its Content-Encoding says: {error}") from None
    if len(content) <= most and not frame.eof:
        raise ConfigError("the request is cut off: its last zstd frame has no end; send it again")
    if len(content) > most:
        raise ConfigError(f"the request has more than {most} bytes when it is unpacked; send fewer datums at a time")
    return bytes(content)


def names_of(body: bytes) -> tuple[str, int]:
    """The model's id and the number of a forward_backward request. Raises `ConfigError`."""
    request = _parsed(body)
    return request.model_id, request.seq_id


def decode_forward_backward(
    body: bytes, reader: InputReader = TEXT_ONLY, *, provenance: bool = True
) -> ForwardBackward:
    """`reader`: of the model's inputs. `provenance=False` leaves it out: for a call whose tokens were compared when it
    came first. Raises `ConfigError`."""
    request = _parsed(body)
    config: dict[str, float | str] = dict(request.loss_fn_config)
    if request.loss_fn_config_v2:
        config = {name: getattr(value, value.WhichOneof("value") or "number") for name, value in
                  request.loss_fn_config_v2.items()}  # fmt: skip
    inputs = reader.read([_chunks(f"datum {index}", datum) for index, datum in enumerate(request.data)])
    data = [
        _datum(f"datum {index}", datum, model_input, provenance)
        for index, (datum, model_input) in enumerate(zip(request.data, inputs, strict=True))
    ]
    return ForwardBackward(request.model_id, request.seq_id, data, request.loss_fn, config, request.forward_only)


def sequences_named(body: bytes) -> set[str]:
    """The sampled sequences that the datums of a ForwardBackwardRequest name. Raises `ConfigError`."""
    spans = (span for datum in _parsed(body).data for span in (*datum.model_input_spans, *datum.loss_fn_input_spans))
    return {getattr(span, _kind(span)).sequence_id for span in spans}


def _parsed(body: bytes) -> Any:
    try:
        return _Request.FromString(body)
    except Exception as error:  # protobuf's DecodeError, whose class depends on its implementation
        raise ConfigError(f"the body is no ForwardBackwardRequest in protobuf: {error}") from None


def _chunks(where: str, datum: Any) -> Chunks:
    chunks = list[Chunk]()
    for index, chunk in enumerate(datum.model_input):
        kind = chunk.WhichOneof("chunk")
        if kind == "encoded_text":
            chunks.append(_array(where, chunk.encoded_text.tokens, np.dtype("<i4")).tolist())
        elif kind == "image":
            image = chunk.image
            if image.HasField("override_dimensions"):
                raise ConfigError(
                    f"{where}, chunk {index}, has override_dimensions; send the image as it is to be read"
                )
            expected = image.expected_tokens if image.HasField("expected_tokens") else None
            chunks.append(Picture(image.data, image.format, expected))
        else:
            kind = kind or "no kind"
            raise ConfigError(f"{where}, chunk {index}, is of type {kind}; this server takes token ids and images")
    ends = np.cumsum([getattr(span, _kind(span)).length for span in datum.model_input_spans], dtype=object)
    sampled = [
        range(end - span.sampled_tokens.length, end)
        for end, span in zip(ends, datum.model_input_spans, strict=True)
        if _kind(span) == "sampled_tokens"
    ]
    return Chunks(where, chunks, sampled)


def _datum(where: str, datum: Any, model_input: ModelInput, provenance: bool) -> Datum:
    inputs = {name: decode_tensor(f"{where}, {name}", value) for name, value in datum.loss_fn_inputs.items()}
    named = None
    if provenance and (datum.model_input_spans or datum.loss_fn_input_spans):
        named = Provenance(_spans(datum.model_input_spans), _spans(datum.loss_fn_input_spans))
    return Datum(model_input, inputs, named)


def _spans(spans: Any) -> Spans:
    kinds = {"prompt_tokens": PromptProvenanceSpan, "sampled_tokens": SampledProvenanceSpan}
    provenance_spans = []
    for span in spans:
        kind = _kind(span)
        run = getattr(span, kind)
        provenance_spans.append(kinds[kind](sequence_id=run.sequence_id, offset=run.offset, length=run.length))
    return tuple(provenance_spans)


def _kind(span: Any) -> str:
    return span.WhichOneof("span") or "prompt_tokens"


def _array(where: str, data: bytes, dtype: np.dtype[Any]) -> np.ndarray:
    if len(data) % dtype.itemsize:
        raise ConfigError(f"{where} has {len(data)} bytes, which is no whole number of {dtype.name}")
    return np.frombuffer(data, dtype)


def decode_tensor(where: str, tensor: Any) -> np.ndarray:
    """A Tensor message, dense or CSR, as a dense array. Raises `ConfigError`."""
    dtype = DTYPES.get(tensor.dtype)
    if dtype is None:
        raise ConfigError(f"{where} has dtype {tensor.dtype}; float32 is {1}, int64 {2} and int32 {3}")
    shape = tuple(tensor.shape)
    if tensor.WhichOneof("encoding") != "sparse_csr":
        array = _array(where, tensor.dense, dtype).copy()  # not the message's own bytes, which cannot be written
        return _shaped(where, array, shape) if shape else array
    csr = tensor.sparse_csr
    indices = (_array(where, data, np.dtype("<i8")) for data in (csr.crow_indices, csr.col_indices))
    return dense_of(where, _array(where, csr.values, dtype), *indices, shape=shape, fill=0)


def dense_of(
    where: str, values: np.ndarray, rows: np.ndarray, columns: np.ndarray, *, shape: Sequence[int], fill: int
) -> np.ndarray:
    """A CSR matrix as a dense one, `fill` where it names no value. Raises `ConfigError`."""
    if (
        len(shape) != 2 or min(shape) < 0 or len(rows) != shape[0] + 1 or rows[0] != 0 or (np.diff(rows) < 0).any()
        or rows[-1] != len(columns) or len(columns) != len(values)
        or (len(columns) and not (columns.min() >= 0 and columns.max() < shape[1]))
    ):  # fmt: skip
        raise ConfigError(f"{where} is no CSR matrix of shape {tuple(shape)}: its indices do not fit")
    if shape[0] * shape[1] > 1 << 28:
        raise ConfigError(f"{where} has shape {tuple(shape)}, which is too large")
    dense = np.full(shape, fill, values.dtype)
    dense[np.repeat(np.arange(shape[0]), np.diff(rows)), columns] = values
    return dense


def _shaped(where: str, array: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    try:
        return array.reshape(shape)
    except ValueError:
        raise ConfigError(f"{where} has {array.size} elements, which do not fit its shape {tuple(shape)}") from None


# ------------------------------------------------------------------------------------------------ results


def encode_output(output: ForwardBackwardOutput) -> bytes:
    """A ForwardBackwardOutput message: one record for each run of datums whose arrays have the same names and trailing
    shapes."""
    result = _Output(loss_fn_output_type=output.loss_fn_output_type, metrics=output.metrics)

    def kind(datum: Mapping[str, np.ndarray]) -> list[tuple[str, Any, tuple[int, ...]]]:
        return sorted((name, array.dtype, array.shape[1:]) for name, array in datum.items())

    for names, group in groupby(output.loss_fn_outputs, kind):
        datums = list(group)
        record = result.loss_fn_outputs.add(type_tag=output.loss_fn_output_type, num_datums=len(datums))
        for name, dtype, trailing in names:
            arrays = [np.ascontiguousarray(datum[name]) for datum in datums]
            offsets = np.cumsum([0, *(array.nbytes for array in arrays)], dtype="<i8")
            field = record.fields[name]
            field.data, field.offsets = b"".join(array.tobytes() for array in arrays), offsets.tobytes()
            field.dtype = NUMBERS[np.dtype(dtype)]
            field.trailing_shape.extend(trailing)
    return result.SerializeToString(deterministic=True)


def encode_sample(response: SampleResponse) -> bytes:
    """A SampleResponse message."""
    result = _Sample(prompt_cache_hit_tokens=response.prompt_cache_hit_tokens)
    for sequence in response.sequences:
        sent = result.sequences.add(
            stop_reason=STOP_REASONS[sequence.stop_reason],
            tokens=np.asarray(sequence.tokens, "<i4").tobytes(),
            logprobs=np.asarray(sequence.logprobs, "<f4").tobytes(),
        )
        if sequence.topk_logprobs is not None:
            _set_topk(sent.topk_sampled_logprobs, sequence.topk_logprobs)
    if response.prompt_logprobs is not None:
        result.prompt_logprobs = np.asarray(response.prompt_logprobs, "<f4").tobytes()
    if response.topk_prompt_logprobs is not None:
        _set_topk(result.topk_prompt_logprobs, response.topk_prompt_logprobs)
    if response.target_prompt_logprobs is not None:
        _set_tensor(result.target_prompt_logprobs, np.asarray(response.target_prompt_logprobs, "<f4"))
    if (alternatives := response.prompt_alt_tokens) is not None:
        _set_alternatives(result.prompt_alt_tokens, alternatives)
    return result.SerializeToString(deterministic=True)


def _set_topk(target: Any, topk: TopkLogprobs) -> None:
    target.token_ids = np.asarray(topk.token_ids, "<i4").tobytes()
    target.logprobs = np.asarray(topk.logprobs, "<f4").tobytes()
    target.length, target.k = topk.token_ids.shape


def _set_tensor(target: Any, array: np.ndarray) -> None:
    target.dense, target.dtype = array.tobytes(), NUMBERS[array.dtype]
    target.shape.extend(array.shape)


def _set_alternatives(target: Any, alternatives: PromptAltTokens) -> None:
    _set_tensor(target.tokens, np.asarray(alternatives.tokens, "<i4"))
    _set_tensor(target.logprobs, np.asarray(alternatives.logprobs, "<f4"))
