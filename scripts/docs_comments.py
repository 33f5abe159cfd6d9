"""Griffe extension of `make docs`: a class lists its fields with the comments behind them, `x: Tensor  # [T]`."""

from __future__ import annotations

import io
import tokenize
from typing import Any

from griffe import Attribute, Class, Docstring, Extension


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


def _comment(field: Attribute) -> str:
    """The comment behind a field of a class body; "" where there is none."""
    if not field.lines or field.name.startswith("_") or field.lines[0].lstrip().startswith("self."):
        return ""
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO("\n".join(field.lines).strip()).readline))
    except tokenize.TokenError:
        return ""
    return " ".join(token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT)
