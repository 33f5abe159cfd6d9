"""Traced losses: the graph gives what the function gives, and what is not allowed is named."""

import operator
from dataclasses import replace

import pytest
import torch
from torch.fx import Node, symbolic_trace
from torch.fx.node import _get_qualified_name

from rlloop.errors import ConfigError
from rlloop.training.custom_loss import CustomLoss
from rlloop.training.types import CustomLossGraph, CustomLossInput, CustomLossNode

SUM = {"ref": "sum_1"}
LOGPROBS = torch.tensor([-0.5, -2.0, -1.25, -0.1])
ADVANTAGES = torch.tensor([1.0, -1.0, 0.5, 2.0])


def encoded(value):
    if isinstance(value, Node):
        return {"ref": value.name}
    if isinstance(value, tuple):
        return {"tuple": [encoded(each) for each in value]}
    if isinstance(value, list):
        return [encoded(each) for each in value]
    if isinstance(value, dict):
        return {"dict": {key: encoded(each) for key, each in value.items()}}
    if isinstance(value, slice):
        return {"slice": [encoded(each) for each in (value.start, value.stop, value.step)]}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if value is ...:
        return {"ellipsis": True}
    if isinstance(value, float) and value in (float("inf"), -float("inf")):
        return {"float": str(value)}
    return value


def graph_of(function) -> CustomLossGraph:
    nodes = []
    for node in symbolic_trace(function).graph.nodes:
        target = str(node.target)
        if node.op == "call_function":
            target = _get_qualified_name(node.target).replace("_operator.", "operator.")
        kwargs = {key: encoded(each) for key, each in node.kwargs.items()}
        nodes.append(CustomLossNode(node.op, node.name, target, [encoded(each) for each in node.args], kwargs))
    return CustomLossGraph(nodes)


def loss_of(function, *ranks: int) -> CustomLoss:
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    ranks = ranks or (1,) * len(names)
    inputs = [CustomLossInput(name, rank) for name, rank in zip(names, ranks, strict=True)]
    return CustomLoss.checked(function.__name__, inputs, graph_of(function))


def clipped(logprobs, advantages):
    ratio = torch.exp(logprobs - logprobs.detach() + 0.1)
    bounded = ratio.clamp(0.9, 1.05)
    loss = -torch.minimum(ratio * advantages, bounded * advantages).sum()
    far = (torch.abs(ratio - 1) > 0.05).to(torch.float32)
    return loss, {"custom/far:sum": far.sum(), "custom/mean:mean": (logprobs * far).sum() / logprobs.numel()}


def indexing(logprobs, advantages):
    last = logprobs[..., 1:]
    kept = last[advantages[1:] > 0]
    low = torch.full_like(kept, -1e9).clamp(min=-3)
    soft = torch.nn.functional.logsigmoid(kept) + torch.where(kept > -1, kept, low)
    return -soft.mean() / logprobs.shape[0] ** 0.5, {}


def stacked(logprobs, advantages):
    both = torch.stack([logprobs, advantages])
    top = both.amax(dim=0)
    return torch.logsumexp(top - logprobs.max(), dim=0) + torch.nn.functional.softplus(logprobs).sum(), {}


@pytest.mark.parametrize("function", [clipped, indexing, stacked])
def test_a_graph_gives_what_its_function_gives(function):
    logprobs = LOGPROBS.clone().requires_grad_()
    wanted, metrics = function(logprobs, ADVANTAGES)
    wanted.backward()
    loss, gradient, found = loss_of(function).evaluate(LOGPROBS, {"advantages": ADVANTAGES})
    assert loss == wanted.item()
    assert logprobs.grad is not None
    assert torch.equal(gradient, logprobs.grad)
    assert found == {key: float(value.detach()) for key, value in metrics.items()}


def test_two_dimensions_and_numbers_are_inputs():
    def distilled(logprobs, target, scale):
        return -(logprobs * target).sum(dim=-1).mean() * scale, {}

    logprobs, target = LOGPROBS.view(2, 2), torch.full((2, 2), 0.5)
    loss, gradient, _ = loss_of(distilled, 2, 2, 0).evaluate(logprobs, {"target": target, "scale": torch.tensor(2)})
    assert loss == pytest.approx(-(logprobs * target).sum(1).mean().item() * 2)
    assert torch.equal(gradient, torch.full((2, 2), -0.5))


def test_equal_graphs_have_one_id():
    assert loss_of(clipped).id == loss_of(clipped).id != loss_of(stacked).id


def matrix(logprobs, advantages):
    return (logprobs @ advantages).sum(), {}


def random(logprobs, advantages):
    return (logprobs * torch.rand_like(logprobs)).sum(), {}


def dropped(logprobs, advantages):
    return torch.nn.functional.dropout(logprobs).sum(), {}


def host(logprobs, advantages):
    return logprobs.sum() * advantages.sum().item(), {}


def private(logprobs, advantages):
    return logprobs.grad_fn, {}


def in_place(logprobs, advantages):
    return logprobs.mul_(2).sum(), {}


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (matrix, "calls operator.matmul, which is not allowed"),
        (random, "calls torch.rand_like, which is not allowed"),
        (dropped, "calls torch.nn.functional.dropout, which is not allowed"),
        (host, "calls method 'item' of a tensor, which is not allowed"),
        (private, r"reads attribute \['grad_fn'\]; allowed are device, dtype, ndim, shape"),
        (in_place, "calls method 'mul_' of a tensor"),
    ],
)
def test_operations_that_are_not_allowed_are_named(function, message):
    with pytest.raises(ConfigError, match=message):
        loss_of(function)


def changed(index: int, **changes) -> CustomLossGraph:
    nodes = graph_of(clipped).nodes
    nodes[index] = replace(nodes[index], **changes)
    return CustomLossGraph(nodes)


@pytest.mark.parametrize(
    ("graph", "message"),
    [
        (changed(2, op="call_module", target="linear"), "has call_module of 'linear'"),
        (changed(2, op="get_attr", target="weight"), "has get_attr of 'weight'"),
        (changed(2, args=[{"ref": "later"}]), "which is not a known encoding"),
        (changed(2, args=[{"device": "cuda:0"}]), "which is not a known encoding"),
        (changed(2, kwargs={"out": None}), "has out="),
        (changed(1, target="weights"), "its inputs are declared as"),
        (changed(3, name="logprobs"), "two operations named 'logprobs'"),
        (changed(-1, args=[SUM]), r"must return \(loss, metrics\)"),
        (
            changed(-1, args=[{"tuple": [{"ref": "sum_1"}, {"dict": {"loss:sum": {"ref": "sum_1"}}}]}]),
            "metric 'loss:sum'",
        ),
        (replace(graph_of(clipped), format=2), "format 2; this version reads format 1"),
        (CustomLossGraph([]), "has 0 operations"),
    ],
)
def test_graphs_that_do_not_hold_together(graph, message):
    inputs = [CustomLossInput("logprobs", 1), CustomLossInput("advantages", 1)]
    with pytest.raises(ConfigError, match=message):
        CustomLoss.checked("mine", inputs, graph)


def large(logprobs, advantages):
    return (logprobs.sum() * torch.zeros_like(logprobs).new_ones((logprobs.shape[0], 1 << 30))).sum(), {}


def spread(logprobs, advantages):
    return logprobs.unsqueeze(0).expand(1 << 30, -1).sum(), {}


def counted(logprobs, advantages):
    return logprobs.sum() * torch.arange(0, logprobs.numel(), step=1e-9).sum(), {}


def ended(logprobs, advantages):
    return logprobs.sum() * torch.arange(logprobs.numel(), end=1 << 30).sum(), {}


def repeated(logprobs, advantages):
    return logprobs.repeat(repeats=[1 << 30]).sum(), {}


def joined(logprobs, advantages):
    wide = torch.zeros_like(logprobs).new_ones((1 << 20,))
    return logprobs.sum() * torch.cat(tensors=[wide] * 100).sum(), {}


def chosen(logprobs, advantages):
    rows = torch.zeros_like(advantages).new_ones((1 << 12, 1 << 8))
    return logprobs.sum() * rows[torch.zeros_like(rows)[:, 0].long().repeat(1 << 8)].sum(), {}


def crossed(logprobs, advantages):
    at = torch.zeros_like(advantages).new_zeros((1 << 14,)).long()
    return logprobs[(at.unsqueeze(0), ...)].sum() + logprobs.unsqueeze(0)[at.unsqueeze(0), at.unsqueeze(1)].sum(), {}


def selected(logprobs, advantages):
    rows = torch.zeros_like(advantages).new_ones((1 << 10, 1 << 12))
    return logprobs.sum() * rows.index_select(-1, index=torch.zeros_like(rows).flatten().long()).sum(), {}


def powers(logprobs, advantages):
    count = logprobs.numel()
    for _ in range(40):
        count = operator.mul(count, count)
    return logprobs.sum() * count, {}


def vector(logprobs, advantages):
    return logprobs * 2, {}


def unequal(logprobs, advantages):
    return (logprobs[1:] + advantages).sum(), {}


def indexed(logprobs, advantages):
    rows = torch.stack([logprobs, advantages], dim=1)
    at = torch.arange(start=0, end=logprobs.numel(), step=2)
    parts = [rows[..., at % 2], rows[None, at, 1], rows[advantages > 0], rows[at, at % 2], rows[[0, 3]], rows[1:, 0]]
    return torch.cat(tensors=[part.flatten() for part in parts]).sum() + logprobs.index_select(0, at).sum(), {}


def test_elements_are_chosen_by_index():
    loss, gradient, _ = loss_of(indexed).evaluate(LOGPROBS, {"advantages": ADVANTAGES})
    leaf = LOGPROBS.clone().requires_grad_()
    expected = indexed(leaf, ADVANTAGES)[0]
    expected.backward()
    assert loss == expected.item()
    assert torch.equal(gradient, leaf.grad)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (large, "new_ones makes more than the"),
        (spread, "expand makes more than the"),
        (counted, "arange makes more than the"),
        (ended, "arange makes more than the"),
        (repeated, "repeat makes more than the"),
        (joined, "cat makes more than the"),
        (chosen, "getitem makes more than the"),
        (crossed, "getitem makes more than the"),
        (selected, "index_select makes more than the"),
        (powers, "a whole number above"),
        (vector, r"returned a tensor \[4\]"),
        (unequal, "operator.add .* failed on this datum"),
    ],
)
def test_graphs_that_do_not_fit_the_data(function, message):
    with pytest.raises(ConfigError, match=message):
        loss_of(function).evaluate(LOGPROBS, {"advantages": ADVANTAGES})
