"""Matrix products of CPU tensors: one, one a group, and the sums over tokens that gradients are."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rlloop.numerics import fp8
from rlloop.numerics.fp8 import Fp8Weight
from rlloop.numerics.kernels.cpu.compiled import grouped
from rlloop.numerics.kernels.cpu.compiled import linear as kernels
from rlloop.numerics.kernels.cpu.compiled.bfloat16 import AMX, CHAIN, flat_rows, kind_of, threads_of
from rlloop.numerics.kernels.cpu.compiled.jit import flat
from rlloop.numerics.kernels.cpu.compiled.linear import FORWARD, GRADIENT, NO, YES, Further
from rlloop.numerics.layout import AdapterTerms
from rlloop.numerics.packed import PackedWeight

NO_SLOTS = np.empty(0, np.int64)
FP8_TERMS = np.int64(fp8.BLOCK)

SQUARES = 1 << 18  # numbers that are squared at a time


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return _multiply(x, True, weight, True, x.dtype, bias, FORWARD)


def adapted_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, z: Tensor, up: Tensor, up_by_row: bool,
    slots: Tensor, ranks: Tensor,
) -> Tensor:  # fmt: skip
    terms = AdapterTerms(z, up, up_by_row, slots, ranks)
    return _multiply(x, True, weight, True, dtype, bias, FORWARD, terms)


def adapted_grouped_linear(
    rows: Tensor, weight: Tensor, by_row: bool, offsets: Tensor, z: Tensor, up: Tensor, up_by_row: bool, slots: Tensor,
    ranks: Tensor,
) -> Tensor:  # fmt: skip
    terms = AdapterTerms(z, up, up_by_row, slots, ranks)
    return _multiply_groups(rows, weight, by_row, flat(offsets), FORWARD, terms)


def linear_float32(x: Tensor, weight: Tensor) -> Tensor:
    return _multiply(x, True, weight, True, torch.float32, None, FORWARD)


def product(rows: Tensor, by_row: bool, lanes: Tensor, lanes_by_row: bool, dtype: torch.dtype) -> Tensor:
    return _multiply(rows, by_row, lanes, lanes_by_row, dtype, None, GRADIENT)


def sum_of_rows(x: Tensor) -> Tensor:
    """[T, N] -> [N] float32, by the product with ones: PyTorch's own order depends on threads."""
    return product(torch.ones(1, len(x)), True, x, False, torch.float32)[0]


def squares_of_rows(x: Tensor) -> Tensor:
    """[N, K] -> [N] float64, in halves: a column of the first half plus its fellow of the second, until one is left."""
    out, step = torch.empty(len(x), dtype=torch.float64), max(1, SQUARES // max(1, x.shape[1]))
    for begin in range(0, len(x), step):
        sums = x[begin : begin + step].double().square_()
        while (half := sums.shape[1] // 2) > 0:
            odd = sums[:, 2 * half :]
            sums = sums[:, :half].add_(sums[:, half : 2 * half])
            sums[:, :1] += odd.sum(1, keepdim=True)  # of one number, or none
        out[begin : begin + step] = sums.sum(1)
    return out


def _multiply(
    rows: Tensor, by_row: bool, lanes: Tensor, lanes_by_row: bool, dtype: torch.dtype, bias: Tensor | None,
    segment: np.int64, terms: AdapterTerms | None = None,
) -> Tensor:  # fmt: skip
    """[M, N], each output summed in segments of so many terms."""
    (num_rows, width), columns = rows.shape if by_row else rows.T.shape, lanes.shape[0 if lanes_by_row else 1]
    if rows.numel() == 0:
        return torch.zeros(num_rows, columns, dtype=dtype)
    kind = kind_of(rows, lanes)
    if kind != CHAIN and not by_row:
        rows, by_row = rows.T, True
    if kind == AMX and width % 2 == 1:  # it reads pairs
        rows, width = F.pad(rows, (0, 1)), width + 1
        lanes = F.pad(lanes, (0, 1) if lanes_by_row else (0, 0, 0, 1))
    out, matrix = torch.empty(num_rows, columns, dtype=dtype), flat(lanes.contiguous())
    threads = threads_of(num_rows * columns * width, columns * width, kind)
    tiles, chunk = kernels.plan(num_rows, columns, width, threads, kind, by_row, lanes_by_row)
    kernels.product(
        threads, matrix, lanes_by_row, vectors := flat_rows(rows, kind), by_row,
        matrix if bias is None else flat(bias), bias is not None, flat(out), num_rows, columns, width,
        segment if kind == CHAIN else FORWARD, kind, tiles, chunk, _further(terms, vectors, matrix),
    )  # fmt: skip
    return out


def _further(terms: AdapterTerms | None, rows: np.ndarray, lanes: np.ndarray) -> Further:
    """The arguments of the kernels; `rows` and `lanes` stand in where there are no terms."""
    if terms is None:
        return Further(rows, lanes, YES, NO_SLOTS, NO_SLOTS, np.int64(0), np.int64(0))
    matrices = _whole_matrices(terms.up)
    return Further(
        flat(terms.z.float().contiguous()), _flat_span(matrices), YES if terms.by_row else NO, flat(terms.slots),
        flat(terms.ranks), np.int64(terms.z.shape[1]), np.int64(matrices.stride(0)),
    )  # fmt: skip


def embedding_backward(grad: Tensor, tokens: Tensor, vocabulary: int) -> Tensor:
    """In segments over the tokens that read the same row."""
    order = tokens.argsort(stable=True)
    ids, counts = tokens[order].unique_consecutive(return_counts=True)
    offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    sums = grouped_weight_gradient(torch.ones(len(grad), 1), grad[order], offsets, grad.dtype)[:, 0]
    return grad.new_zeros(vocabulary, grad.shape[1]).index_copy_(0, ids, sums)


def grouped_linear(rows: Tensor, weight: Tensor, by_row: bool, offsets: Tensor) -> Tensor:
    return _multiply_groups(rows, weight, by_row, flat(offsets), FORWARD)


def grouped_rows_gradient(rows: Tensor, weight: Tensor, by_row: bool, offsets: Tensor) -> Tensor:
    return _multiply_groups(rows, weight, by_row, flat(offsets), GRADIENT)


def fp8_product(codes: Tensor, scales: Tensor, weight: Fp8Weight, offsets: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Chains of 128 terms, joined as every product's are. Scales are powers of 2, so a chain of the dequantised numbers
    has the bits of one of the codes, scaled."""
    rows = fp8.dequantised(codes, scales, 1, torch.float32)
    if offsets is None:
        return _multiply(rows, True, weight.widened(), True, dtype, None, FP8_TERMS)
    return _multiply_groups(rows, weight.widened(), True, flat(offsets), FP8_TERMS).to(dtype)


def _multiply_groups(
    rows: Tensor, weight: Tensor, by_row: bool, offsets: np.ndarray, segment: np.int64,
    terms: AdapterTerms | None = None,
) -> Tensor:  # fmt: skip
    if isinstance(weight, PackedWeight):  # of the groups that have rows
        used = np.diff(offsets) > 0
        chosen = np.flatnonzero(used) if used.any() else np.zeros(1, np.int64)
        weight = torch.stack([weight.matrix(int(group)).dequantised() for group in chosen])
        offsets = np.append(offsets[chosen], offsets[-1])
    columns, width, counts = weight.shape[1 if by_row else 2], rows.shape[1], np.diff(offsets)
    out = rows.new_empty(len(rows), columns)
    if out.numel():  # then there are groups
        weight = _whole_matrices(weight)
        kind = kind_of(rows, weight, width)
        first_task, tiles, chunk = grouped.plan(counts, columns, kind, True)
        grouped.grouped_product(
            threads_of(out.numel() * width, weight.numel(), kind), lanes := _flat_span(weight),
            np.arange(len(weight)) * weight.stride(0), by_row, vectors := flat_rows(rows, kind),
            offsets[:-1] * (width // 2 if kind == AMX else width), True, flat(out), offsets[:-1] * columns, counts,
            np.full(len(counts), width), first_task, columns, segment if kind == CHAIN else FORWARD, kind, tiles, chunk,
            _further(terms, vectors, lanes),
        )  # fmt: skip
    return out


def grouped_weight_gradient(left: Tensor, right: Tensor, offsets: Tensor, dtype: torch.dtype) -> Tensor:
    begins, kind = flat(offsets), kind_of(left, right)
    if len(begins) == 1:  # no groups
        return right.new_empty(0, left.shape[1], right.shape[1], dtype=dtype)
    if kind == AMX and np.any(np.diff(begins) % 2):
        left, right, begins = _even_groups(left, right, begins)
    (_, outputs), (_, columns), widths = left.shape, right.shape, np.diff(begins)
    if by_row := kind != CHAIN:
        left = torch.cat([group.T.reshape(-1) for group in left.split(widths.tolist())])
    out = right.new_empty(len(widths), outputs, columns, dtype=dtype)
    counts = np.full(len(widths), outputs)
    first_task, tiles, chunk = grouped.plan(counts, columns, kind, by_row)
    grouped.grouped_product(
        threads_of(len(right) * outputs * columns, right.numel(), kind), lanes := flat(right.contiguous()),
        begins[:-1] * columns, False, vectors := flat_rows(left, kind),
        begins[:-1] * outputs // (2 if kind == AMX else 1), by_row, flat(out),
        np.arange(len(widths)) * outputs * columns, counts, widths, first_task, columns,
        GRADIENT if kind == CHAIN else FORWARD, kind, tiles, chunk, _further(None, vectors, lanes),
    )  # fmt: skip
    return out


def _even_groups(left: Tensor, right: Tensor, begins: np.ndarray) -> tuple[Tensor, Tensor, np.ndarray]:
    """Rows of 0 behind each group of an odd number of rows, since AMX reads pairs."""
    counts = np.diff(begins)
    padded = np.append(0, np.cumsum(counts + counts % 2))
    at = torch.from_numpy(np.arange(begins[-1]) + np.repeat(padded[:-1] - begins[:-1], counts))
    left, right = (rows.new_zeros(int(padded[-1]), rows.shape[1]).index_copy_(0, at, rows) for rows in (left, right))
    return left, right, padded


def _whole_matrices(weight: Tensor) -> Tensor:
    """[G, A, B] whose matrices are each contiguous: as it is where they are, whatever lies between them."""
    whole = weight.stride(2) == 1 and weight.stride(1) == weight.shape[2] and weight.stride(0) >= weight[0].numel()
    return weight if whole else weight.contiguous()


def _flat_span(weight: Tensor) -> np.ndarray:
    """The memory from the first of [G, A, B] whole matrices to the last."""
    length = (weight.shape[0] - 1) * weight.stride(0) + weight.shape[1] * weight.shape[2]
    return flat(weight.detach().as_strided((length,), (1,)))
