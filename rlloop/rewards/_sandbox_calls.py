"""Calls between a test and the program that it tests, in two sandboxed processes. Standard library only.

The program's process answers requests (`serve`). The test runs in a process of its own (`run_test`), in which each name
that it neither defines nor imports is looked up in the program. Values cross as plain data: None, bool, int, float,
complex, str, bytes, list, tuple, dict, set, frozenset and range. For anything else of the program's (functions,
instances, iterators) the test has a `Remote`, which can be called, iterated, asked for attributes, items, length and
text, but not compared.
"""

import ast
import builtins
import importlib
import json
import operator
import os
import sys
from collections.abc import Callable
from typing import Any

COLLECTIONS = {"tuple": tuple, "set": set, "frozenset": frozenset}
OPERATIONS: dict[str, Callable[..., Any]] = {
    "call": lambda function, *args, **kwargs: function(*args, **kwargs),
    "attribute": getattr,
    "len": len,
    "iter": iter,
    "next": next,
    "bool": bool,
    "str": str,
    "item": operator.getitem,
    "set item": operator.setitem,
    "isinstance": isinstance,
}


def encode(value: Any, other: Callable[[Any], Any]) -> Any:
    """`value` as JSON values. `other` encodes anything but plain data, such as instances of the program's classes.

    The standard library's subclasses (Counter, defaultdict) cross as the plain type.
    """
    if type(value).__module__ == "__main__":
        return other(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [encode(each, other) for each in value]
    if isinstance(value, dict):
        return {"dict": [[encode(key, other), encode(each, other)] for key, each in value.items()]}
    for name, kind in COLLECTIONS.items():
        if isinstance(value, kind):
            return {name: [encode(each, other) for each in value]}
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, range):
        return {"range": [value.start, value.stop, value.step]}
    return other(value)


def decode(data: Any, other: Callable[[int], Any]) -> Any:
    """The inverse of `encode`; `other` decodes an object's number."""
    if isinstance(data, list):
        return [decode(each, other) for each in data]
    if not isinstance(data, dict):
        return data
    [(name, held)] = data.items()
    if name == "dict":
        return {decode(key, other): decode(each, other) for key, each in held}
    if name in COLLECTIONS:
        return COLLECTIONS[name](decode(each, other) for each in held)
    if name == "bytes":
        return bytes.fromhex(held)
    return complex(*held) if name == "complex" else range(*held) if name == "range" else other(held)


# ------------------------------------------------------------------------------------------------ the program's side


def serve(names: dict[str, Any], read: int, write: int) -> None:
    """Answer requests (operation, positional arguments, keyword arguments), one a line, until the pipe is closed."""
    held: list[Any] = []

    def keep(value: Any) -> Any:
        held.append(value)
        return {"object": len(held) - 1}

    def name(text: str) -> Any:
        if text not in names:
            raise NameError(f"name {text!r} is not defined")
        return names[text]

    operations = {**OPERATIONS, "name": name, "plain": _plain}
    sys.set_int_max_str_digits(0)
    with open(read) as requests, open(write, "w") as answers:
        for line in requests:
            operation, args, kwargs = decode(json.loads(line), held.__getitem__)
            try:
                value = encode(operations[operation](*args, **kwargs), keep)
                answer = {"value": value, "args": [encode(each, keep) if _changes(each) else None for each in args]}
            except Exception as error:  # raised again in the test, which may expect it
                kinds = [kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins"]
                answer = {"raised": kinds[0], "text": str(error)}
            answers.write(json.dumps(answer) + "\n")
            answers.flush()


def _plain(value: Any) -> Any:
    """An instance of the program's own subclass of a plain type (a named tuple, an enumeration) as that type."""
    kinds: tuple[Any, ...] = int, float, complex, str, bytes, list, tuple, dict, set, frozenset
    for kind in kinds:
        if isinstance(value, kind):
            return kind(value)
    raise TypeError(f"a {type(value).__name__} cannot be compared; only plain data can")


def _changes(value: Any) -> bool:
    return isinstance(value, list | dict | set)


# ------------------------------------------------------------------------------------------------ the test's side


class Unsupported(BaseException):
    """The test cannot be run with any program. A BaseException, so that the test's `except Exception` does not catch
    it."""


class Raised(Exception):
    """Mixed into the class of an exception that the program raised."""


class Program:
    """The test's end of the channel."""

    def __init__(self, read: int, write: int) -> None:
        self.answers, self.requests = os.fdopen(read), os.fdopen(write, "w")

    def ask(self, operation: str, *args: Any, **kwargs: Any) -> Any:
        request = encode([operation, list(args), kwargs], _encode_remote)
        self.requests.write(json.dumps(request) + "\n")
        self.requests.flush()
        answer = json.loads(self.answers.readline() or '{"raised": "EOFError", "text": "the program has ended"}')
        if "raised" in answer:
            kind = getattr(builtins, answer["raised"], None)
            # StopIteration may only answer `next`: raised inside map(), it would silently end that.
            ends = operation != "next" and kind in (StopIteration, StopAsyncIteration)
            if ends or not (isinstance(kind, type) and issubclass(kind, Exception)):
                kind = RuntimeError
            raise type(kind.__name__, (Raised, kind), {})(str(answer["text"]))
        for mine, theirs in zip(args, answer["args"], strict=True):
            if theirs is not None and _changes(mine):
                _update(mine, decode(theirs, self._remote))
        return decode(answer["value"], self._remote)

    def _remote(self, number: int) -> "Remote":
        return Remote(self, number)


def _encode_remote(value: Any) -> Any:
    if not isinstance(value, Remote):
        raise Unsupported(f"it gives the program a {type(value).__name__}; only plain data can be given")
    return {"object": value._number}


def _update(mine: Any, theirs: Any) -> None:
    """Apply the program's changes of an argument to the test's own."""
    if isinstance(mine, list):
        mine[:] = theirs
    elif mine != theirs:
        mine.clear()
        mine.update(theirs)


class Remote:
    """An object of the program's that is not plain data."""

    def __init__(self, program: Program, number: int) -> None:
        self._program, self._number = program, number

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._program.ask("call", self, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return self._program.ask("attribute", self, name)

    def __len__(self) -> int:
        return self._program.ask("len", self)

    def __iter__(self) -> Any:
        return self._program.ask("iter", self)

    def __next__(self) -> Any:
        return self._program.ask("next", self)

    def __bool__(self) -> bool:
        return self._program.ask("bool", self)

    def __str__(self) -> str:
        return self._program.ask("str", self)

    def __getitem__(self, key: Any) -> Any:
        return self._program.ask("item", self, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._program.ask("set item", self, key, value)

    def __eq__(self, other: object) -> bool:
        return self._program.ask("plain", self) == other  # compared here, as plain data

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def __instancecheck__(self, instance: Any) -> bool:
        return self._program.ask("isinstance", instance, self)

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        raise Unsupported("it derives a class from one of the program's")


class Names(dict[str, Any]):
    """A test's globals; other names are the program's."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program

    def __missing__(self, name: str) -> Any:
        if hasattr(builtins, name):
            raise KeyError(name)  # Python then looks among the builtins
        return self.program.ask("name", name)


def run_test(test: str, read: int, write: int) -> dict[str, str]:
    """Run a test. Returns {"verdict": "passed", "failed" or "unsupported", "why": text}."""
    sys.set_int_max_str_digits(0)
    try:
        tree = ast.parse(test, "<test>")
        if len(tree.body) == 1 and isinstance(tree.body[0], ast.Expr):  # an expression alone must be true
            tree.body[0] = ast.copy_location(ast.Assert(tree.body[0].value, None), tree.body[0])
        code = compile(tree, "<test>", "exec")
    except (SyntaxError, ValueError) as error:
        return {"verdict": "unsupported", "why": f"it is not Python: {error}"}
    names = Names(Program(read, write))
    try:
        names |= _modules(tree)
        exec(code, names)
    except BaseException as error:  # any exception: the test has not passed
        broken = isinstance(error, Unsupported | ImportError) and not isinstance(error, Raised)
        kind = "" if isinstance(error, Unsupported) else f"{type(error).__name__}: "
        return {"verdict": "unsupported" if broken else "failed", "why": f"{kind}{error}"[:500]}
    return {"verdict": "passed", "why": ""}


def _modules(tree: ast.AST) -> dict[str, Any]:
    """Modules of the standard library that a test uses (`math.isclose`) without importing them."""
    attributes = [each for each in ast.walk(tree) if isinstance(each, ast.Attribute)]
    used = {each.value.id for each in attributes if isinstance(each.value, ast.Name)}
    return {name: importlib.import_module(name) for name in used & sys.stdlib_module_names}
