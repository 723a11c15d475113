"""User code on its way to the nodes: pickled once, with a clear word on what refuses.

Runs in: driver
"""

from __future__ import annotations

import inspect
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from types import CodeType
from typing import Any

import cloudpickle

from sparkdl.core.errors import ConfigError


def pickle_user_code(map_fun: Callable[..., Any], args: Any) -> bytes:
    """Return the pickled `(map_fun, args)`.

    Raises:
        ConfigError: if something cannot be pickled; the message names the variable.
    """
    if not callable(map_fun):
        raise ConfigError(
            f"map_fun must be a function of (args, ctx), not {type(map_fun).__name__}"
        )
    try:
        return bytes(cloudpickle.dumps((map_fun, args)))
    except Exception as error:
        found = list(culprits(map_fun, args))
        what = "; ".join(found) or "something that map_fun refers to"
        raise ConfigError(
            f"map_fun and its arguments go to the executors by pickle, which refuses {what} "
            f"({type(error).__name__}: {error}). Create it inside map_fun instead"
        ) from error


def culprits(map_fun: Callable[..., Any], args: Any = None) -> Iterator[str]:
    """Name what cannot be pickled: variables that `map_fun` uses, and entries of `args`."""
    for name, value in _captured(map_fun):
        if not _can_pickle(value):
            yield f"the variable {name!r} ({type(value).__module__}.{type(value).__qualname__})"
    if not _can_pickle(args):
        entries = _entries(args)
        bad = [(name, value) for name, value in entries if not _can_pickle(value)]
        for name, value in bad or [("args", args)]:
            yield f"the argument {name!r} ({type(value).__module__}.{type(value).__qualname__})"


def _captured(map_fun: Callable[..., Any]) -> Iterator[tuple[str, Any]]:
    if isinstance(map_fun, partial):
        yield from [*_entries(map_fun.args), *map_fun.keywords.items()]
        yield from _captured(map_fun.func)
    elif inspect.ismethod(map_fun):
        yield from _entries(map_fun.__self__)
        yield from _captured(map_fun.__func__)
    elif inspect.isfunction(map_fun):
        cells = zip(map_fun.__code__.co_freevars, map_fun.__closure__ or (), strict=True)
        for name, cell in cells:
            with suppress(ValueError):  # not assigned yet
                yield name, cell.cell_contents
        namespace = map_fun.__globals__
        for name in sorted(_names(map_fun.__code__) & namespace.keys()):
            yield name, namespace[name]
    else:
        yield from _entries(map_fun)


def _names(code: CodeType) -> set[str]:
    """Return the names that a function uses, in the functions inside it as well."""
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*map(_names, inner))


def _entries(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, Mapping):
        return [(str(key), item) for key, item in value.items()]
    if isinstance(value, Namespace) or hasattr(value, "__dict__"):
        return list(vars(value).items())
    if isinstance(value, (list, tuple)):
        return [(f"args[{i}]", item) for i, item in enumerate(value)]
    return []


def _can_pickle(value: Any) -> bool:
    try:
        cloudpickle.dumps(value)
    except Exception:  # noqa: BLE001 (whatever pickle raises, the answer is no)
        return False
    return True
