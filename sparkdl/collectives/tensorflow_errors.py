"""Errors of ours that are TensorFlow's as well, for who catches either.

Runs in: child
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from sparkdl.core.errors import CollectiveError, ConfigError, MismatchError, SparkdlError


@contextmanager
def tensorflows_too() -> Iterator[None]:
    """Turn `CollectiveError` and `ConfigError` inside into errors that are TensorFlow's as well.

    `FailedPreconditionError` if members called different things, `InvalidArgumentError` for what
    cannot be, `UnknownError` for lost members: those that Horovod's operations raise.
    """
    try:
        yield
    except (CollectiveError, ConfigError) as error:
        raise tensorflows(error) from error.__cause__


def tensorflows(error: SparkdlError) -> SparkdlError:
    """Return the error as one that is TensorFlow's as well; itself if it is already."""
    import tensorflow as tf

    is_both = isinstance(error, tf.errors.OpError)
    return error if is_both else _made(type(error), str(error))


def _made(kind: Any, message: str) -> SparkdlError:
    made: SparkdlError = _both(kind)(None, None, message)
    return made


@cache
def _both(kind: Any) -> Any:
    import tensorflow as tf

    theirs: Any = tf.errors.UnknownError
    if issubclass(kind, ConfigError):
        theirs = tf.errors.InvalidArgumentError
    elif issubclass(kind, MismatchError):
        theirs = tf.errors.FailedPreconditionError

    # AutoGraph makes errors anew with their place in the source if they take these arguments.
    def __init__(self: Any, node_def: Any, op: Any, message: str, *args: Any) -> None:  # noqa: N807
        theirs.__init__(self, node_def, op, message, *args)

    def __reduce__(self: Any) -> Any:  # noqa: N807
        return _made, (kind, self.message)

    members = {"__init__": __init__, "__reduce__": __reduce__, "__module__": kind.__module__}
    return type(kind.__name__, (kind, theirs), members | {"__doc__": kind.__doc__})
