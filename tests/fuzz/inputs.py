"""Random inputs: valid samples, damaged in one place or several. The same seed gives the same ones.

Why not Hypothesis: it looks for small examples, and comes to a thousand inputs a second; this comes
to some ten thousand, and bytes that were valid once get deeper than bytes that never were.
"""

from __future__ import annotations

import json
import os
import random
import typing
from collections.abc import Iterator, Sequence
from enum import Enum
from types import UnionType
from typing import Any

SEED = int(os.environ.get("FUZZ_SEED") or 0)
"""Of a failure, to see it again: `make test SEED=… ARGS=tests/fuzz`."""
INPUTS = int(os.environ.get("FUZZ_INPUTS") or 20_000)
"""Of all targets together; each says which share is its own."""

_NUMBERS = (0, 1, 2, 127, 128, 255, 2**16, 2**31 - 1, 2**31, 2**32, 2**62, 2**63 - 1, 2**64 - 1)
_ODD: tuple[Any, ...] = (
    *_NUMBERS, *(-n for n in _NUMBERS), 2**200, -(2**200), 0.5, 1e308, -1e308, None, True, False,
    "", "x" * 300, "\0", "\ud800", "é", "NaN", [], {}, [[]], [None], {"": ""}, [[[[[[[[[]]]]]]]]],
)  # fmt: skip


def share(part: float) -> int:
    """Return how many inputs a target gets that is to have this part of all."""
    return max(1, int(INPUTS * part))


def damaged(samples: Sequence[bytes], count: int, name: str) -> Iterator[bytes]:
    rng = random.Random(f"{SEED} {name}")
    for _ in range(count):
        data = bytearray(rng.choice(samples))
        for _ in range(rng.choice((1, 1, 1, 2, 4, 16))):
            _damage(data, samples, rng)
        yield bytes(data)


def altered(samples: Sequence[bytes], count: int, name: str) -> Iterator[bytes]:
    """Yield samples of JSON: half of them with other values in them, half with damaged bytes."""
    rng = random.Random(f"{SEED} {name} JSON")
    parsed = [json.loads(sample) for sample in samples]
    for data in damaged(samples, count, name):
        if rng.random() < 0.5:
            yield data
            continue
        value = _altered(rng.choice(parsed), parsed, rng)
        yield json.dumps(value, ensure_ascii=rng.random() < 0.9).encode(errors="surrogatepass")


def _damage(data: bytearray, samples: Sequence[bytes], rng: random.Random) -> None:
    at = rng.randrange(len(data) + 1)
    kind = rng.randrange(8)
    if kind == 0:
        del data[at:]
    elif kind == 1:
        del data[at : at + rng.randrange(1, 9)]
    elif kind == 2:
        data[at:at] = rng.randbytes(rng.randrange(1, 9))
    elif kind == 3 and at < len(data):
        data[at] ^= 1 << rng.randrange(8)
    elif kind == 4:
        width = rng.choice((1, 2, 4, 8))
        number = rng.choice(_NUMBERS) % (1 << 8 * width)
        data[at : at + width] = number.to_bytes(width, rng.choice(("little", "big")))
    elif kind == 5:
        other = rng.choice(samples)
        cut = rng.randrange(len(other) + 1)
        data[at : at + rng.randrange(33)] = other[cut : cut + rng.randrange(33)]
    elif kind == 6:
        data[at:at] = data[at : at + rng.randrange(33)] * rng.choice((1, 2, 50))
    else:
        data[at : at + 1] = rng.choice((b"\0", b"\xff", b'"', b"{", b"[", b"-", b"\\", b"\xed\xa0"))


def _altered(value: Any, others: Sequence[Any], rng: random.Random) -> Any:
    """Return a copy with something else in one place."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        key = rng.choice(list(value))
        changed = dict(value)
        match rng.randrange(12):
            case 0:
                del changed[key]
            case 1:
                changed[str(rng.choice(_ODD))] = value[key]
            case _:
                changed[key] = _altered(value[key], others, rng)
        return changed
    if isinstance(value, list) and value and rng.random() < 0.85:
        at, items = rng.randrange(len(value)), list(value)
        items[at : at + 1] = [_altered(value[at], others, rng)] * rng.choice((1, 1, 1, 0, 3))
        return items
    return rng.choice(others) if rng.random() < 0.05 else rng.choice(_ODD)


def example_of(kind: Any, within: tuple[Any, ...] = ()) -> Any:
    """Return a value of a type: struct, dataclass, named tuple, union's first, collection of one.

    Args:
        within: the types that it is part of; a tuple of one of these is empty.
    """
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    plain = {int: 1, float: 8.0, str: "input", bool: True, bytes: b"\1\2", Any: 1}
    if kind in plain:
        return plain[kind]
    if origin in (typing.Union, UnionType):
        return example_of(inner[0], within)
    if origin is typing.Annotated:
        return example_of(inner[0], within)
    if origin is typing.Literal:
        return inner[0]
    if origin is tuple:
        wanted = [each for each in inner if each is not Ellipsis and each not in within]
        return tuple(example_of(each, within) for each in wanted)
    if origin in (dict, list):
        parts = [example_of(each, within) for each in inner]
        return {parts[0]: parts[1]} if origin is dict else parts
    if issubclass(kind, Enum):
        return next(iter(kind))
    names = getattr(kind, "__dataclass_fields__", ()) or getattr(kind, "_fields", ())
    names = names or kind.__struct_fields__
    hints = typing.get_type_hints(kind, include_extras=True)
    return kind(**{name: example_of(hints[name], (*within, kind)) for name in names})
