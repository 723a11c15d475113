"""TensorFlow's messages without TensorFlow: classes of protobuf with its numbers, names and bytes.

Runs in: anywhere

Fields that are not named here are kept as unknown ones.
https://github.com/tensorflow/tensorflow/blob/v2.21.0/tensorflow/core/example/feature.proto
https://github.com/tensorflow/tensorflow/blob/v2.21.0/tensorflow/core/example/example.proto
"""

from __future__ import annotations

from functools import cache
from typing import Any

from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

_PACKAGE = "tensorflow"
_SCALARS = {
    "bytes": FieldDescriptorProto.TYPE_BYTES,
    "float": FieldDescriptorProto.TYPE_FLOAT,
    "int64": FieldDescriptorProto.TYPE_INT64,
    "string": FieldDescriptorProto.TYPE_STRING,
}
_MESSAGES = {  # message: its fields, by their numbers
    "BytesList": {1: "repeated bytes value"},
    "FloatList": {1: "repeated float value"},
    "Int64List": {1: "repeated int64 value"},
    "Feature": {
        1: "oneof BytesList bytes_list",
        2: "oneof FloatList float_list",
        3: "oneof Int64List int64_list",
    },
    "Features": {1: "map Feature feature"},
    # TensorFlow's has no field 2: a SequenceExample has its feature lists there.
    "Example": {1: "optional Features features", 2: "optional bytes feature_lists"},
}


@cache
def example_class() -> Any:
    """Return the class of `Example`."""
    pool = DescriptorPool()  # not the default one, where TensorFlow registers its own
    pool.Add(_file())
    return GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.Example"))


def _file() -> FileDescriptorProto:
    file = FileDescriptorProto(name="sparkdl/messages.proto", package=_PACKAGE, syntax="proto3")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for number, line in fields.items():
            label, kind, field_name = line.split()
            if label == "map":
                label, kind = "repeated", f"{name}.{_add_entry(message, field_name, kind)}"
            elif label == "oneof" and not message.oneof_decl:
                message.oneof_decl.add(name="kind")
            _add_field(message, field_name, number, label, kind)
    return file


def _add_entry(message: Any, field_name: str, kind: str) -> str:
    """Add the message that an entry of a map is; return its name."""
    entry = f"{field_name.title().replace('_', '')}Entry"
    nested = message.nested_type.add(name=entry)
    nested.options.map_entry = True
    _add_field(nested, "key", 1, "optional", "string")
    _add_field(nested, "value", 2, "optional", kind)
    return entry


def _add_field(message: Any, name: str, number: int, label: str, kind: str) -> None:
    field = message.field.add(name=name, number=number)
    is_repeated = label == "repeated"
    field.label = field.LABEL_REPEATED if is_repeated else field.LABEL_OPTIONAL
    field.type = _SCALARS.get(kind, field.TYPE_MESSAGE)
    if kind not in _SCALARS:
        field.type_name = f".{_PACKAGE}.{kind}"
    if label == "oneof":
        field.oneof_index = 0
