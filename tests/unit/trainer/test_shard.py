"""Nothing in the arithmetic of an update knows where a shard ends."""

import math
import weakref
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from rlloop.models.safetensors_io import write_tensors
from rlloop.numerics.kernels import kernels_for
from rlloop.numerics.tree import TreeSum, tree_sum
from rlloop.parallel.collectives import Ranks
from rlloop.trainer.shard import VECTOR, make_shard

ALONE = Ranks()


def same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a, b)


@pytest.mark.parametrize("threads", [1, 2])
def test_adamw_has_the_same_bits_on_both_sides_of_a_cut(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    generator = torch.Generator().manual_seed(0)
    weights, gradients = torch.randn(2, 200 * VECTOR, generator=generator).unbind()

    def stepped(begin: int, end: int) -> Tensor:
        weight = torch.nn.Parameter(weights[begin:end].clone())
        weight.grad = gradients[begin:end].clone()
        optimizer = torch.optim.AdamW([weight], lr=1e-2, weight_decay=0.1, fused=True)
        for _ in range(3):
            optimizer.step()
        state = optimizer.state[weight]
        return torch.stack([weight.detach(), state["exp_avg"], state["exp_avg_sq"]])

    try:
        whole = stepped(0, len(weights))
        for cut in range(VECTOR, 200 * VECTOR, 13 * VECTOR):
            assert same(torch.cat([stepped(0, cut), stepped(cut, len(weights))], 1), whole)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("shape", "dtype", "apart", "shares"),
    [
        ((6, 16), torch.float32, False, True),
        ((6, 16), torch.float32, True, False),
        ((6, 16), torch.bfloat16, False, False),
        ((5, 3), torch.float32, False, False),  # no whole vectors
    ],
)
def test_masters_are_whole_vectors(shape: tuple[int, ...], dtype: torch.dtype, apart: bool, shares: bool) -> None:
    live = torch.nn.Parameter(torch.randn(shape).to(dtype))
    shard = make_shard("weight", live, ALONE, 1, apart=apart)
    assert shard.shares_memory == shares == (shard.flat.data_ptr() == live.data_ptr())
    assert shard.flat.numel() % VECTOR == 0
    assert same(shard.master, live.detach().float())
    assert (shard.flat[live.numel() :] == 0).all()


def test_squares_of_a_row_do_not_depend_on_other_rows() -> None:
    kernel = kernels_for(torch.device("cpu")).squares_of_rows
    for width in (1, 3, 24, 1000, 70_001):
        x = torch.randn(9, width)
        whole = kernel(x)
        torch.testing.assert_close(whole, x.double().square().sum(-1))
        for begin, end in ((0, 1), (4, 7), (8, 9)):
            assert same(kernel(x[begin:end].clone()), whole[begin:end])
    assert kernel(torch.randn(0, 4)).shape == (0,)


def test_narrow_terms_are_added_in_float32_and_borrowed_ones_stay() -> None:
    terms = [torch.randn(50).bfloat16() for _ in range(7)]
    kept, counter = [term.clone() for term in terms], TreeSum()
    for term in terms:
        counter.push(term, borrowed=True)
    a, b, c, d, e, f, g = (term.float() for term in terms)
    total = counter.total()
    assert total is not None
    assert same(total, ((a + b) + (c + d)) + ((e + f) + g)) or same(total, (g + (e + f)) + ((a + b) + (c + d)))
    assert all(same(term, before) for term, before in zip(terms, kept, strict=True))


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 8, 9, 33])
def test_a_sum_holds_few_partial_sums(count: int) -> None:
    counter, leaves = TreeSum(), []
    for pushed in range(1, count + 1):
        term = torch.ones(5, dtype=torch.bfloat16)
        leaves.append(weakref.ref(term))
        counter.push(term)
        del term
        held = [each for each in counter._sums if each is not None]
        assert len(held) == pushed.bit_count() <= math.ceil(math.log2(count)) + 1
        assert sum(leaf() is not None for leaf in leaves) == pushed % 2  # what has been added is free
        assert len({each.data_ptr() for each in held}) == len(held)
        del held
    total = counter.total()
    assert total is not None
    assert same(total, torch.full((5,), float(count)))


def test_neighbours_are_added_first() -> None:
    a, b, c, d, e = torch.tensor([1e8, 1.0, -1e8, 1.0, 3.0])
    assert same(tree_sum(torch.stack([a, b, c, d, e])), ((a + b) + (c + d)) + e)
    assert tree_sum(torch.zeros(0)) == 0


def test_tensors_are_written_one_at_a_time(tmp_path: Path) -> None:
    tensors = {"one": torch.randn(3, 2), "two": torch.tensor(4.0), "three": torch.randn(5).bfloat16()}
    entries = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    write_tensors(tmp_path / "file.safetensors", entries, iter(tensors.values()))
    read = load_file(tmp_path / "file.safetensors")
    assert read.keys() == tensors.keys()
    assert all(same(read[name], tensor) for name, tensor in tensors.items())
