"""What tells a function of the user's from another one, in every process."""

from __future__ import annotations

import dis
import functools
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import is_dataclass
from hashlib import sha256
from types import CodeType, FunctionType
from typing import Any

import numpy as np

_OPEN = ("__dict__", "__weakref__", "__module__", "__doc__", "__firstlineno__")
_GLOBALS = ("LOAD_GLOBAL", "LOAD_NAME")


def identity(make: Any) -> str:
    """Return a digest of a function's code, and of the values that it refers to.

    A pickle's would not do: it holds names of files (in a notebook those of the process), numbers
    of lines, and addresses. Code of other modules, and objects of their classes, have their names
    alone.
    """
    inner = make
    while isinstance(inner, functools.partial):
        inner = inner.func
    home = getattr(inner, "__module__", None) or ""
    homes = ("__main__", "" if home.startswith("sparkdl.") else home)
    return _told(make, homes, {})


def _told(value: Any, homes: tuple[str | None, ...], seen: dict[int, Any]) -> str:
    """Return a digest; of a text's length, however deep the value is."""
    return sha256(repr(_told_by(value, homes, seen)).encode()).hexdigest()


def _told_by(value: Any, homes: tuple[str | None, ...], seen: dict[int, Any]) -> Any:
    if value is None or isinstance(value, str | bytes | int | float | complex | os.PathLike):
        return repr(value)
    if id(value) in seen:
        return "again"
    seen[id(value)] = value
    if isinstance(value, Mapping):
        return sorted((_told(k, homes, seen), _told(v, homes, seen)) for k, v in value.items())
    if isinstance(value, list | tuple | set | frozenset):
        each = [_told(each, homes, seen) for each in value]
        return each if isinstance(value, list | tuple) else sorted(each)
    if hasattr(value, "__array__") and not isinstance(value, type):
        with suppress(Exception):  # a tensor on a GPU, say: it has its name
            array = np.asarray(value.detach() if hasattr(value, "detach") else value)
            return str(array.dtype), array.shape, sha256(array.tobytes()).hexdigest()
    kind = type(value)
    name = [
        f"{getattr(x, '__module__', '')}.{getattr(x, '__qualname__', '')}" for x in (value, kind)
    ]
    return name, _told(_parts(value, homes), homes, seen)


def _parts(value: Any, homes: tuple[str | None, ...]) -> Any:
    """Return what else tells an object from others of its name."""
    kind = type(value)
    if isinstance(value, CodeType):
        return value.co_code, value.co_names, value.co_varnames, value.co_consts
    if isinstance(value, functools.partial):
        return value.func, value.args, value.keywords
    is_code = isinstance(value, FunctionType | type)
    is_own = (value if is_code else kind).__module__ in homes
    if isinstance(value, FunctionType) and is_own:
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        used = {n: value.__globals__[n] for n in _names(value.__code__) if n in value.__globals__}
        return value.__code__, cells, value.__defaults__, value.__kwdefaults__, used
    if hasattr(kind, "state_dict"):
        with suppress(Exception):
            return value.state_dict()
    if is_own or is_dataclass(kind):
        state = getattr(value, "__dict__", {})
        return kind, {name: part for name, part in state.items() if name not in _OPEN}
    return None


def _names(code: CodeType) -> list[str]:
    """Return the globals that code refers to."""
    inner = [each for each in code.co_consts if isinstance(each, CodeType)]
    found = [x.argval for x in dis.get_instructions(code) if x.opname in _GLOBALS]
    return [*found, *(name for each in inner for name in _names(each))]
