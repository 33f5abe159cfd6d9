"""Message classes of `training.proto`, built when they are imported: no compiler, and no generated file.

    from rlloop.api.schema import message
    request = message("ForwardBackwardRequest").FromString(body)

Reads the part of proto3 that the file uses: messages and enums of one package, scalar, repeated, optional, map and
oneof fields, comments. Needs the extra `serve`.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

from rlloop.errors import ConfigError

try:
    from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto
    from google.protobuf.descriptor_pool import DescriptorPool
    from google.protobuf.message_factory import GetMessageClass
except ImportError:
    raise ConfigError("the training API needs the extra `serve`: pip install 'rlloop[serve]'") from None

FILE = Path(__file__).with_name("training.proto")
PACKAGE = "rlloop.api"

_SCALARS = {
    name: getattr(FieldDescriptorProto, f"TYPE_{name.upper()}")
    for name in ("double", "float", "int32", "int64", "uint32", "uint64", "bool", "string", "bytes")
}
_FIELD = re.compile(r"(repeated |optional )?(map<\w+, \w+>|\w+) (\w+) = (\d+);")
_BLOCK = re.compile(r"(message|enum|oneof) (\w+) \{")


def message(name: str) -> Any:
    """The class of a message. Raises `KeyError` for a name that `training.proto` has not."""
    return GetMessageClass(_pool().FindMessageTypeByName(f"{PACKAGE}.{name}"))


@cache
def _pool() -> DescriptorPool:
    pool = DescriptorPool()  # one of its own: another library may have registered its version of the same messages
    pool.AddSerializedFile(parse(FILE.read_text()).SerializeToString())
    return pool


def parse(text: str) -> FileDescriptorProto:
    """A file of proto3 as its descriptor."""
    file = FileDescriptorProto(name=FILE.name, package=PACKAGE, syntax="proto3")
    text = " ".join(line.partition("//")[0].strip() for line in text.splitlines())
    enums = {name for kind, name in _BLOCK.findall(text) if kind == "enum"}
    at = 0
    while block := _BLOCK.search(text, at):
        end = _end_of(text, block.end())
        body = text[block.end() : end]
        if block[1] == "enum":
            enum = file.enum_type.add(name=block[2])
            for name, number in re.findall(r"(\w+) = (\d+);", body):
                enum.value.add(name=name, number=int(number))
        else:
            _add_message(file.message_type.add(name=block[2]), body, enums)
        at = end
    return file


def _end_of(text: str, start: int) -> int:
    """Index of the closing brace of the block whose body begins at `start`."""
    depth = 1
    for match in re.finditer(r"[{}]", text[start:]):
        depth += 1 if match[0] == "{" else -1
        if not depth:
            return start + match.start()
    raise ValueError(f"a block of {FILE.name} has no end: {text[start : start + 80]!r}")


def _add_message(target: DescriptorProto, body: str, enums: set[str]) -> None:
    oneofs = {}  # where each one's fields lie in the text
    for match in _BLOCK.finditer(body):
        oneofs[len(target.oneof_decl)] = range(match.end(), _end_of(body, match.end()))
        target.oneof_decl.add(name=match[2])
    for match in _FIELD.finditer(body):
        label, kind, name, number = match.groups()
        field = target.field.add(name=name, number=int(number), label=FieldDescriptorProto.LABEL_OPTIONAL)
        if kind.startswith("map<"):
            _add_map(target, field, kind, enums)
            continue
        _set_type(field, kind, enums)
        if label == "repeated ":
            field.label = FieldDescriptorProto.LABEL_REPEATED
        for index, where in oneofs.items():
            if match.start() in where:
                field.oneof_index = index
    for field in target.field:  # proto3's optional is a oneof of one field, and those stand after the written ones
        if re.search(rf"optional \w+ {field.name} = ", body):
            field.proto3_optional, field.oneof_index = True, len(target.oneof_decl)
            target.oneof_decl.add(name=f"_{field.name}")


def _add_map(target: DescriptorProto, field: FieldDescriptorProto, kind: str, enums: set[str]) -> None:
    entry = target.nested_type.add(name=f"{field.name.title().replace('_', '')}Entry")
    entry.options.map_entry = True
    for number, (member, type_) in enumerate(zip(("key", "value"), kind[4:-1].split(", "), strict=True), 1):
        _set_type(entry.field.add(name=member, number=number, label=FieldDescriptorProto.LABEL_OPTIONAL), type_, enums)
    field.label, field.type = FieldDescriptorProto.LABEL_REPEATED, FieldDescriptorProto.TYPE_MESSAGE
    field.type_name = f".{PACKAGE}.{target.name}.{entry.name}"


def _set_type(field: FieldDescriptorProto, kind: str, enums: set[str]) -> None:
    if kind in _SCALARS:
        field.type = _SCALARS[kind]
        return
    field.type = FieldDescriptorProto.TYPE_ENUM if kind in enums else FieldDescriptorProto.TYPE_MESSAGE
    field.type_name = f".{PACKAGE}.{kind}"
