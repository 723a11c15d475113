"""Messages of any content, from the types of their fields: a new one is tried at once."""

from __future__ import annotations

from functools import cache
from typing import Any, get_args

import msgspec.inspect as types
from hypothesis import strategies as st

from sparkdl.core.options import Roles
from sparkdl.core.spec import ClusterSpec, plan_nodes
from sparkdl.core.world import Address, World, build_world

INT = st.integers(-(2**63), 2**64 - 1)
TEXT = st.text(max_size=12)
NUMBER = st.floats(allow_nan=False, allow_infinity=False)
PLAIN: dict[type, st.SearchStrategy[Any]] = {
    types.AnyType: TEXT | INT,
    types.BoolType: st.booleans(),
    types.BytesType: st.binary(max_size=30),
    types.FloatType: NUMBER,
    types.IntType: INT,
    types.NoneType: st.none(),
    types.StrType: TEXT,
}


@st.composite
def worlds(draw: st.DrawFn) -> World:
    nodes = plan_nodes(
        draw(st.integers(3, 6)),
        Roles(ps=draw(st.integers(0, 1)), chief="chief", evaluator=draw(st.booleans())),
    )
    return build_world(draw(INT), {n: Address(draw(TEXT), draw(INT), draw(TEXT)) for n in nodes})


MADE: dict[type, st.SearchStrategy[Any]] = {
    World: worlds(),
    ClusterSpec: st.builds(ClusterSpec, TEXT, st.just(plan_nodes(3, Roles(ps=1, chief="chief")))),
}
"""What is no mere record: its parts belong together."""


def messages(union: Any) -> dict[type, st.SearchStrategy[Any]]:
    """Return for each kind of message in a union what makes any such message."""
    return {kind: instances(kind) for kind in get_args(union)}


@cache
def instances(cls: type) -> st.SearchStrategy[Any]:
    if cls in MADE:
        return MADE[cls]
    fields: Any = types.type_info(cls)
    return st.deferred(lambda: st.builds(cls, **{f.name: values(f.type) for f in fields.fields}))


def values(kind: types.Type) -> st.SearchStrategy[Any]:
    match kind:
        case types.UnionType():
            return st.one_of(*map(values, kind.types))
        case types.LiteralType():
            return st.sampled_from(kind.values)
        case types.VarTupleType():
            return st.lists(values(kind.item_type), max_size=3).map(tuple)
        case types.TupleType():
            return st.tuples(*map(values, kind.item_types))
        case types.DictType():
            return st.dictionaries(values(kind.key_type), values(kind.value_type), max_size=2)
        case types.StructType() | types.DataclassType() | types.NamedTupleType():
            return instances(kind.cls)
    return PLAIN[type(kind)]
