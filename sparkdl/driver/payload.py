"""Pickling user code for the nodes, with errors that name the variable."""

from __future__ import annotations

import inspect
import sys
from collections import ChainMap
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from io import BytesIO
from types import CodeType
from typing import Any, ClassVar

import cloudpickle

from sparkdl.core.errors import ConfigError


def pickle_user_code(map_fun: Callable[..., Any], args: Any) -> bytes:
    """Return the pickled `(map_fun, args)`."""
    if not callable(map_fun):
        raise ConfigError(
            f"map_fun must be a function of (args, ctx), not {type(map_fun).__name__}"
        )
    check_arity(map_fun)
    return pickled(map_fun, args)


def pickled(map_fun: Callable[..., Any], args: Any) -> bytes:
    """Return the pickled `(map_fun, args)`, whatever the function is called with.

    Raises:
        ConfigError: if that fails; it names the variables to blame.
    """
    try:
        return dumps((map_fun, args))
    except Exception as error:
        # Only after the failure: pickling each variable by itself takes long with large ones.
        what = "; ".join(unpicklable(map_fun, args)) or "something that map_fun refers to"
        raise ConfigError(
            f"map_fun and its arguments go to the executors by pickle, which refuses {what} "
            f"({type(error).__name__}: {error}). Create it inside map_fun. Nodes have no Spark: "
            "feed rows with cluster.feed(…), and pass results of the driver's session as values"
        ) from error


def dumps(value: Any) -> bytes:
    """Return a value pickled by cloudpickle, with the files that tracebacks of its code name.

    From 3.1.3 on cloudpickle writes `<dynamic-code>` instead, and tracebacks show no lines.
    """
    with BytesIO() as file:
        _Pickler(file).dump(value)
        return file.getvalue()


def _code(code: CodeType) -> tuple[Any, ...]:
    make, parts = cloudpickle.CloudPickler.dispatch_table[CodeType](code)
    return make, tuple(code.co_filename if part == "<dynamic-code>" else part for part in parts)


class _Pickler(cloudpickle.CloudPickler):  # type: ignore[misc]
    # In front of cloudpickle's own table, which all its users share.
    dispatch_table: ClassVar[Any] = ChainMap(
        {CodeType: _code}, cloudpickle.CloudPickler.dispatch_table
    )

    def reducer_override(self, obj: Any) -> Any:
        pyspark: Any = sys.modules.get("pyspark")
        given: Any = obj
        if pyspark is not None and isinstance(obj, getattr(pyspark, "Broadcast", ())):
            # With its value, as in a task that has loaded it: nodes cannot ask Spark for it.
            return type(obj), (None, None, None, ""), {"_value": given.value}
        if pyspark is not None and isinstance(obj, getattr(pyspark, "Accumulator", ())):
            raise TypeError(f"{obj!r} is an accumulator: return the number from map_fun instead")
        return super().reducer_override(obj)


def check_arity(function: Callable[..., Any]) -> None:
    """Check that `map_fun` can be called with `(args, ctx)`, as far as its signature shows."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of builtins, some have none
        return
    try:
        signature.bind(None, None)
    except TypeError as error:
        called = getattr(function, "__name__", type(function).__name__)
        raise ConfigError(
            f"map_fun is called as {called}(args, ctx), and {called}{signature} does not take "
            f"these two: {error}. Give it the parameters args and ctx; functools.partial adds "
            "others"
        ) from None


def unpicklable(map_fun: Callable[..., Any], args: Any = None) -> list[str]:
    """Name the values that cannot be pickled, of `map_fun`'s variables and of `args`."""
    function = map_fun.func if isinstance(map_fun, partial) else map_fun
    named: list[tuple[str, Any]] = []
    if inspect.isfunction(function):
        with suppress(ValueError):  # of a variable that is not assigned yet
            found = inspect.getclosurevars(function)
            named += [
                (f"the variable {n!r}", v) for n, v in {**found.globals, **found.nonlocals}.items()
            ]
    if not _can_pickle(args):
        entries = args if isinstance(args, Mapping) else getattr(args, "__dict__", {})
        wrong = [(name, value) for name, value in entries.items() if not _can_pickle(value)]
        named += [(f"the argument {name!r}", value) for name, value in wrong or [("args", args)]]
    return [
        f"{name} ({type(value).__module__}.{type(value).__qualname__})"
        for name, value in named
        if not _can_pickle(value)
    ]


def _can_pickle(value: Any) -> bool:
    try:
        dumps(value)
    except Exception:  # noqa: BLE001 (whatever pickle raises, the answer is no)
        return False
    return True
