"""Custom losses as data: a graph traced by torch.fx, evaluated over a whitelist of operations.

A graph contains no code: names are looked up in the tables below, and all others are refused by name before anything
runs. A loss gets one datum at a time, in float32 on the host: logprobs, and the `loss_fn_inputs` that it declares. It
returns (loss, metrics); losses are summed over datums, and metrics are reduced as their names' endings say.
"""

from __future__ import annotations

import json
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from rlloop.errors import ConfigError
from rlloop.training.types import CustomLossGraph, CustomLossInput, CustomLossNode

MOST_NODES, MOST_INPUTS, MOST_ELEMENTS, LARGEST = 2000, 16, 1 << 26, 1 << 62
INPUT = re.compile(r"[a-z_][a-z0-9_]{0,63}")
METRIC = re.compile(r"custom/[a-z0-9_./-]{1,64}:(sum|mean)")

# In torch and as methods of tensors alike.
BOTH = """
    abs absolute acos add addcdiv addcmul all amax amin any argmax argmin argsort asin atan atan2 ceil clamp clamp_max
    clamp_min clip cos cosh cummax cummin cumprod cumsum detach diff div divide dot eq erf erfc exp exp2 expm1 flatten
    flip floor floor_divide fmod frac gather ge greater greater_equal gt index_select isfinite isinf isnan le lerp less
    less_equal log log10 log1p log2 log_softmax logaddexp logcumsumexp logical_and logical_not logical_or logical_xor
    logit logsumexp lt masked_fill masked_select max maximum mean median min minimum movedim mul multiply narrow ne neg
    negative nan_to_num nansum norm not_equal numel permute pow prod reciprocal relu remainder reshape roll round rsqrt
    select sigmoid sign sin sinh softmax sort sqrt square squeeze std sub subtract sum swapaxes t tan tanh topk
    transpose true_divide trunc unbind unsqueeze var where xlogy
"""
FUNCTIONS = (
    "arange broadcast_to cat concat empty_like full full_like ones ones_like outer stack tensor zeros zeros_like"
)
METHODS = "bool contiguous dim double expand expand_as float int long new_ones new_zeros repeat size to type_as view"
FUNCTIONAL = "elu gelu hardtanh huber_loss l1_loss leaky_relu logsigmoid mse_loss silu smooth_l1_loss softplus"
OPERATORS = "abs add and_ eq floordiv ge getitem gt inv invert le lt mod mul ne neg not_ or_ pos pow sub truediv xor"
MATH = "ceil exp expm1 floor isfinite isinf isnan log log10 log1p log2 pow sqrt"
GETATTR = ("getattr", "builtins.getattr")
ATTRIBUTES = ("device", "dtype", "ndim", "shape")
CONSTANTS = {
    "dtype": {name: getattr(torch, name) for name in ("bool", "float32", "float64", "int32", "int64")},
    "device": {"cpu": torch.device("cpu")},
    "layout": {"strided": torch.strided},
    "memory_format": {
        name: getattr(torch, name) for name in ("contiguous_format", "preserve_format")
    },
    "float": {"inf": math.inf, "-inf": -math.inf, "nan": math.nan},
}  # fmt: skip
SIZED = {"ones": 0, "zeros": 0, "full": 0, "new_ones": 1, "new_zeros": 1, "broadcast_to": 1, "expand": 1, "repeat": 1}


def _functions() -> dict[str, Callable[..., Any]]:
    allowed = {f"torch.{name}": getattr(torch, name) for name in [*BOTH.split(), *FUNCTIONS.split()]}
    allowed["torch.empty_like"] = torch.zeros_like  # operations that return uninitialised memory are left out
    for name in [*FUNCTIONAL.split(), "relu", "sigmoid", "tanh", "softmax", "log_softmax"]:
        function = getattr(torch.nn.functional, name)
        allowed |= {f"torch.nn.functional.{name}": function, f"torch._C._nn.{name}": function}
    allowed["torch._C._nn.log_sigmoid"] = torch.nn.functional.logsigmoid
    allowed |= {f"operator.{name}": getattr(operator, name) for name in OPERATORS.split()}
    allowed |= {f"math.{name}": getattr(math, name) for name in MATH.split()}
    return allowed


ALLOWED = _functions()
ALLOWED_METHODS = frozenset([*BOTH.split(), *METHODS.split()])


@dataclass(frozen=True)
class CustomLoss:
    """A checked graph. `id` is a function of its content."""

    name: str
    id: str
    inputs: tuple[CustomLossInput, ...]  # logprobs first
    nodes: tuple[CustomLossNode, ...]

    @classmethod
    def checked(cls, name: str, inputs: Sequence[CustomLossInput], graph: CustomLossGraph) -> CustomLoss:
        """Raises `ConfigError` for what is not allowed, by name, or does not hold together."""
        where = f"custom loss {name!r}"
        if graph.format != 1:
            raise ConfigError(f"{where} has format {graph.format!r}; this version reads format 1")
        if not inputs or inputs[0].name != "logprobs" or inputs[0].rank not in (1, 2) or len(inputs) > MOST_INPUTS:
            raise ConfigError(
                f"{where} has {len(inputs)} inputs; it takes logprobs, of 1 or 2 dimensions, first, and at most "
                f"{MOST_INPUTS} inputs in all"
            )
        for each in inputs:
            if not INPUT.fullmatch(each.name) or each.rank not in (0, 1, 2):
                raise ConfigError(
                    f"{where}: input {each.name!r} has {each.rank!r} dimensions; a name is lowercase letters, digits "
                    "and underscores, and dimensions are 0, 1 or 2"
                )
        if not 0 < len(graph.nodes) <= MOST_NODES:
            raise ConfigError(f"{where} has {len(graph.nodes)} operations; it may have 1 to {MOST_NODES}")
        _check_nodes(where, inputs, graph.nodes)
        content = json.dumps([list(map(asdict, inputs)), list(map(asdict, graph.nodes))], sort_keys=True)
        return cls(
            name, f"loss-{blake2b(content.encode(), digest_size=8).hexdigest()}", tuple(inputs), tuple(graph.nodes)
        )

    @torch.enable_grad()
    def evaluate(self, logprobs: Tensor, inputs: Mapping[str, Tensor]) -> tuple[float, Tensor, dict[str, float]]:
        """The loss of a datum, its gradient by logprobs (float32, in their shape), and the metrics.

        Raises `ConfigError` for operations that do not fit the data, or whose results are too large.
        """
        leaf = logprobs.detach().float().requires_grad_()
        arguments = [leaf, *(inputs[each.name] for each in self.inputs[1:])]
        arguments = [each.float() if each.is_floating_point() else each for each in arguments]
        loss, metrics = _run(f"custom loss {self.name!r}", self.nodes, arguments)
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
            raise ConfigError(f"custom loss {self.name!r} returned {_words(loss)}; a loss is one floating-point number")
        gradient = torch.zeros_like(leaf)
        if loss.requires_grad:
            (gradient,) = torch.autograd.grad(loss.reshape(()), leaf, allow_unused=True, materialize_grads=True)
        return float(loss.detach()), gradient.float(), metrics


def _check_nodes(where: str, inputs: Sequence[CustomLossInput], nodes: Sequence[CustomLossNode]) -> None:
    known: set[str] = set()
    placeholders = [node.target for node in nodes if node.op == "placeholder"]
    if placeholders != [each.name for each in inputs]:
        raise ConfigError(f"{where} reads {placeholders}; its inputs are declared as {[each.name for each in inputs]}")
    for node in nodes:
        if node.name in known:
            raise ConfigError(f"{where} has two operations named {node.name!r}; names must differ")
        if node.op == "call_function":
            _check_function(where, node)
        elif node.op == "call_method":
            if node.target not in ALLOWED_METHODS:
                raise ConfigError(f"{where} calls method {node.target!r} of a tensor, which is not allowed")
        elif node.op not in ("placeholder", "output"):
            raise ConfigError(f"{where} has {node.op} of {node.target!r}; only functions and methods can be called")
        if "out" in node.kwargs:
            raise ConfigError(f"{where} writes into a tensor ({node.name} has out=), which is not allowed")
        for value in [*node.args, *node.kwargs.values()]:
            _decode(value, dict.fromkeys(known), where)
        known.add(node.name)
    last = nodes[-1]
    if last.op != "output" or sum(node.op == "output" for node in nodes) > 1:
        raise ConfigError(f"{where} must end with its one output")
    _check_output(where, last)


def _check_function(where: str, node: CustomLossNode) -> None:
    if node.target in GETATTR:
        if len(node.args) != 2 or node.args[1] not in ATTRIBUTES:
            raise ConfigError(f"{where} reads attribute {node.args[1:]}; allowed are {', '.join(ATTRIBUTES)}")
    elif node.target not in ALLOWED:
        raise ConfigError(
            f"{where} calls {node.target}, which is not allowed; allowed are functions of torch and math that compute "
            "numbers from numbers, without randomness, files or matrix products"
        )


def _check_output(where: str, node: CustomLossNode) -> None:
    value = node.args[0] if len(node.args) == 1 else None
    pair = value.get("tuple") if isinstance(value, dict) else value
    if not isinstance(pair, list) or len(pair) != 2 or not _is_ref(pair[0]):
        raise ConfigError(f"{where} must return (loss, metrics), the loss an operation's result")
    metrics = pair[1].get("dict") if isinstance(pair[1], dict) else None
    if not isinstance(metrics, dict):
        raise ConfigError(f"{where} must return its metrics as a dict")
    for key, each in metrics.items():
        if not METRIC.fullmatch(key) or not _is_ref(each):
            raise ConfigError(f"{where}: metric {key!r} must be custom/NAME:sum or custom/NAME:mean, and a tensor")


def _is_ref(value: Any) -> bool:
    return isinstance(value, dict) and value.keys() == {"ref"}


def _decode(value: Any, results: Mapping[str, Any], where: str) -> Any:
    """The value that an encoded argument stands for."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, list):
        return [_decode(each, results, where) for each in value]
    kind: str = next(iter(value)) if isinstance(value, dict) and len(value) == 1 else ""
    content = value[kind] if kind else None
    if kind == "ref" and isinstance(content, str) and content in results:
        return results[content]
    if kind == "tuple" and isinstance(content, list):
        return tuple(_decode(each, results, where) for each in content)
    if kind == "dict" and isinstance(content, dict):
        return {key: _decode(each, results, where) for key, each in content.items()}
    if kind == "slice" and isinstance(content, list) and len(content) == 3:
        return slice(*(_decode(each, results, where) for each in content))
    if kind == "ellipsis":
        return ...
    if kind in CONSTANTS and isinstance(content, str) and content in CONSTANTS[kind]:
        return CONSTANTS[kind][content]
    raise ConfigError(f"{where} has the argument {json.dumps(value)[:80]}, which is not a known encoding")


def _run(where: str, nodes: Sequence[CustomLossNode], inputs: Sequence[Tensor]) -> tuple[Any, dict[str, float]]:
    results: dict[str, Any] = {}
    waiting, elements = iter(inputs), 0
    for node in nodes:
        if node.op == "placeholder":
            results[node.name] = next(waiting)
            continue
        args = _decode(node.args, results, where)
        kwargs = {key: _decode(value, results, where) for key, value in node.kwargs.items()}
        if node.op == "output":
            loss, metrics = args[0]
            return loss, {key: _number(where, key, value) for key, value in metrics.items()}
        name = node.target.rpartition(".")[2]
        try:
            if _size(name, args, kwargs) > MOST_ELEMENTS - elements:
                raise ConfigError(
                    f"{where}: {node.target} makes more than the {MOST_ELEMENTS} numbers that a datum may"
                )
            result = results[node.name] = _call(node, args, kwargs)
        except ConfigError:
            raise
        except (RuntimeError, TypeError, ValueError, IndexError, ArithmeticError, AttributeError) as error:
            raise ConfigError(f"{where}: {node.target} ({node.name}) failed on this datum: {error}") from error
        elements += result.numel() if isinstance(result, Tensor) else 0
    raise AssertionError("a checked graph ends with its output")


def _call(node: CustomLossNode, args: list[Any], kwargs: dict[str, Any]) -> Any:
    if node.op == "call_method":
        if not isinstance(args[0], Tensor):
            raise TypeError(f"{_words(args[0])} is not a tensor")
        return getattr(args[0], node.target)(*args[1:], **kwargs)
    if node.target in GETATTR:
        if not isinstance(args[0], Tensor):
            raise TypeError(f"{_words(args[0])} is not a tensor")
        return getattr(*args)
    module, _, name = node.target.rpartition(".")
    if module in ("math", "operator") and name != "getitem":
        kinds = (int, float) if module == "math" else (int, float, Tensor)
        if wrong := [value for value in args if not isinstance(value, kinds)]:
            raise TypeError(f"{_words(wrong[0])} is not a number")
        if name == "pow":
            args = [float(value) if isinstance(value, int) else value for value in args]
    result = ALLOWED[node.target](*args, **kwargs)
    if isinstance(result, int) and abs(result) > LARGEST:
        raise OverflowError(f"a whole number above {LARGEST}")
    return result


def _size(name: str, args: list[Any], kwargs: dict[str, Any]) -> int:
    """An upper bound of the elements that a call makes."""
    tensors = [value for value in [*args, *kwargs.values()] if isinstance(value, Tensor)]
    largest = max((each.numel() for each in tensors), default=0)
    if name in SIZED:  # the sizes begin at this argument
        of = args[SIZED[name] :] if name != "full" else args[:1]
        named = [kwargs.get("size", ()), kwargs.get("repeats", ())]
        sizes = [max(value, 1) for value in _flat([*of, *named]) if isinstance(value, int)]
        return math.prod(sizes) * (largest if name in ("repeat", "expand") else 1)
    if name == "arange":
        names = ("start", "end", "step") if len(args) > 1 or "end" in kwargs else ("end",)
        given = {"start": 0, "end": 0, "step": 1, **dict(zip(names, args, strict=False)), **kwargs}
        begin, end, step = given["start"], given["end"], given["step"]
        return int(min(abs(float(end) - float(begin)) / max(abs(float(step)), 1e-9), 2**62))
    if name in ("cat", "concat", "stack"):
        return sum(value.numel() for value in _flat([*args, *kwargs.values()]) if isinstance(value, Tensor))
    if name == "getitem" and isinstance(args[0], Tensor):
        return _selected(args[0], args[1])
    if name == "index_select":
        of, dim, index = (*args, *(kwargs[key] for key in ("input", "dim", "index") if key in kwargs))
        return _selected(of, (*[slice(None)] * (dim % max(of.ndim, 1)), index))
    if name == "outer":
        return math.prod(each.numel() for each in tensors)
    try:
        return max(largest, math.prod(torch.broadcast_shapes(*(each.shape for each in tensors))))
    except RuntimeError:
        return largest  # indices, lists of shapes: none is larger than the largest


def _selected(of: Tensor, key: Any) -> int:
    """An upper bound of the elements of `of[key]`: indices that are tensors or lists may name an element many times."""
    entries = key if isinstance(key, tuple) else (key,)
    at, rest, shapes = 0, of.numel(), list[tuple[int, ...]]()
    for each in entries:
        if each is ...:
            at += of.ndim - sum(_indexed(other) for other in entries)
            continue
        dims = _indexed(each)
        if isinstance(each, (Tensor, list)):
            indexed = math.prod(of.shape[at : at + dims])
            rest //= max(indexed, 1)
            masks = isinstance(each, Tensor) and each.dtype == torch.bool
            shapes.append((indexed,) if masks else tuple(torch.as_tensor(each).shape))
        at += dims
    return rest * math.prod(torch.broadcast_shapes(*shapes))


def _indexed(entry: Any) -> int:
    """The number of dimensions that an entry of an index stands for."""
    if isinstance(entry, Tensor) and entry.dtype == torch.bool:
        return entry.ndim
    return int(entry is not None and entry is not ... and not isinstance(entry, bool))


def _flat(value: Any) -> list[Any]:
    return [each for item in value for each in _flat(item)] if isinstance(value, (list, tuple)) else [value]


def _number(where: str, key: str, value: Any) -> float:
    if not isinstance(value, (Tensor, int, float)) or (isinstance(value, Tensor) and value.numel() != 1):
        raise ConfigError(f"{where}: metric {key!r} is {_words(value)}; it must be one number")
    return float(value.detach() if isinstance(value, Tensor) else value)


def _words(value: Any) -> str:
    return f"a tensor {list(value.shape)} of {value.dtype}" if isinstance(value, Tensor) else f"{value!r:.60}"
