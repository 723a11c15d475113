"""Horovod's `tensorflow.util`: helpers that programs import from there.

Runs in: child

https://github.com/horovod/horovod/blob/v0.28.1/horovod/tensorflow/util.py
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def vars_to_refs(variables: Any) -> Any:
    """Return what can be hashed and compared for a variable, or a tuple of it for a list."""
    if isinstance(variables, list):
        return tuple(map(vars_to_refs, variables))
    return variables.ref()


def refs_to_vars(refs: Any) -> Any:
    """Return the variables that `vars_to_refs` was given."""
    if isinstance(refs, tuple):
        return list(map(refs_to_vars, refs))
    return refs.deref()


def _executing_eagerly() -> bool:
    import tensorflow as tf

    return bool(tf.executing_eagerly())


def _make_subgraph(function: Callable[..., Any]) -> Any:
    import tensorflow as tf

    return tf.function(function)


def _cache(function: Callable[..., Any]) -> Callable[..., Any]:
    """Remember what a function has returned for arguments, in graphs and eagerly."""
    found: dict[Any, Any] = {}

    def wrapper(*args: Any) -> Any:
        key = (args, _executing_eagerly())
        if key not in found:
            found[key] = function(*args)
        return found[key]

    return wrapper
