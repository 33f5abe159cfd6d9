"""Griffe extension of `make docs`: the comment behind a dataclass's field, `x: Tensor  # [T] float32`, documents it."""

from __future__ import annotations

import ast
import io
import tokenize
from typing import Any

from griffe import Attribute, Docstring, Extension, ObjectNode


class FieldComments(Extension):
    def on_attribute_instance(self, *, node: ast.AST | ObjectNode, attr: Attribute, **_: Any) -> None:
        if attr.docstring is not None or not attr.lines or attr.parent is None or not attr.parent.is_class:
            return
        try:
            tokens = list(tokenize.generate_tokens(io.StringIO("\n".join(attr.lines).strip()).readline))
        except tokenize.TokenError:
            return
        if comments := [token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT]:
            attr.docstring = Docstring(" ".join(comments), lineno=attr.lineno, parent=attr)
