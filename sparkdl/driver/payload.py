"""User code on its way to the nodes: pickled once, with a clear word on what refuses.

Runs in: driver
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
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
        return cloudpickle.dumps((map_fun, args))
    except Exception as error:
        culprits = list(_culprits(map_fun, args))
        what = "; ".join(culprits) or "something that map_fun refers to"
        raise ConfigError(
            f"map_fun and its arguments go to the executors by pickle, which refuses {what} "
            f"({type(error).__name__}: {error}). Create it inside map_fun instead"
        ) from error


def _culprits(map_fun: Callable[..., Any], args: Any) -> Iterator[str]:
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
    code = getattr(map_fun, "__code__", None)
    if code is None:
        yield from _entries(map_fun)
        return
    for name, cell in zip(code.co_freevars, map_fun.__closure__ or (), strict=True):  # type: ignore[attr-defined]
        yield name, cell.cell_contents
    namespace = map_fun.__globals__  # type: ignore[attr-defined]
    for name in code.co_names:
        if name in namespace:
            yield name, namespace[name]


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
