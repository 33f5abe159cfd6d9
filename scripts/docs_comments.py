"""Griffe extension of `make docs`: a class lists its fields with the comments behind them, `x: Tensor  # [T]`.

A method without a docstring has that of the method which it overrides.
"""

from __future__ import annotations

import io
import tokenize
from collections.abc import Iterator
from typing import Any

from griffe import AliasResolutionError, Attribute, Class, Docstring, Extension, Function, Module


class FieldComments(Extension):
    def on_class_members(self, *, cls: Class, **_: Any) -> None:
        fields = [
            member
            for member in cls.members.values()
            if isinstance(member, Attribute) and "property" not in member.labels
        ]
        lines = [f"- `{field.name}`: {text}" for field in fields if (text := _comment(field))]
        if lines:
            before = cls.docstring.value + "\n\n" if cls.docstring else ""
            cls.docstring = Docstring(before + "\n".join(lines), parent=cls)

    def on_package(self, *, pkg: Module, **_: Any) -> None:
        for cls in _classes(pkg):
            for name, member in cls.members.items():
                if isinstance(member, Function | Attribute) and member.docstring is None and not name.startswith("_"):
                    overridden = (base.members[name] for base in _bases(cls) if name in base.members)
                    member.docstring = next((each.docstring for each in overridden if each.docstring), None)


def _classes(module: Module) -> Iterator[Class]:
    for member in module.members.values():
        if isinstance(member, Module):
            yield from _classes(member)
        elif isinstance(member, Class):
            yield member


def _bases(cls: Class) -> list[Class]:
    try:
        return cls.mro()
    except (AliasResolutionError, ValueError):  # a base of another package
        return []


def _comment(field: Attribute) -> str:
    """The comment behind a field of a class body; "" where there is none."""
    if not field.lines or field.name.startswith("_") or field.lines[0].lstrip().startswith("self."):
        return ""
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO("\n".join(field.lines).strip()).readline))
    except tokenize.TokenError:
        return ""
    return " ".join(token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT)
