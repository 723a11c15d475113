"""Operations that go on beside the caller.

Runs in: child
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from sparkdl.collectives.base import Group
from sparkdl.core.errors import ConfigError

T = TypeVar("T")


class Handle:
    """An operation that was started; give it to `synchronize` or `poll`, or call it to wait."""

    def __init__(self, future: Future[Any]) -> None:
        self._future = future

    def __repr__(self) -> str:
        return f"Handle({'done' if self._future.done() else 'going on'})"

    def __call__(self) -> Any:
        """Wait for the result, as programs do with what `sparse_allreduce_async` returns."""
        return synchronize(self)

    def done(self) -> bool:
        """Whether the result is there."""
        return self._future.done()

    def result(self) -> Any:
        """Wait for the result; the operation's own deadline ends the wait."""
        return self._future.result()


def started(group: Group, work: Callable[[], Any], name: str | None = None) -> Handle:
    """Start `work` in the group's thread, after what was started before.

    Raises:
        ConfigError: if something of this name is under way.
    """
    return Handle(group.submit(work, name))


def synchronize(handle: Handle) -> Any:
    """Wait for an operation, and return its result.

    Raises:
        CollectiveError: if it failed; `HorovodInternalError` is its other name.
        ConfigError: if `handle` is none.
    """
    return _checked(handle).result()


def poll(handle: Handle) -> bool:
    """Whether an operation is done, so that `synchronize` returns at once.

    Raises:
        ConfigError: if `handle` is none.
    """
    return _checked(handle).done()


def _checked(handle: Handle) -> Handle:
    if not isinstance(handle, Handle):
        raise ConfigError(f"{handle!r} is no handle: give what an _async operation returned")
    return handle
