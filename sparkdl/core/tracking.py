"""Where a tracker of experiments learns what trains: nothing inside sparkdl knows who that is.

Runs in: driver

A search has trials, a trial or a fit has clusters. Each is a span that lies within another one, by
the context of the thread that begins it. What a tracker raises is logged and harms no training.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, Literal, Protocol

_log = logging.getLogger(__name__)
Kind = Literal["search", "trial", "fit"]
Note = Callable[..., None]


class Tracker(Protocol):
    """What is told of trainings. Its calls must be quick: the user's thread makes them."""

    def begin(self, kind: Kind, within: Any, facts: dict[str, Any]) -> Any:
        """Return the span that begins; `within` is the one around it, None for none."""

    def note(self, span: Any, **facts: Any) -> None:
        """Take what came of a span."""

    def end(self, span: Any, error: BaseException | None) -> None:
        """A span has ended; what it has raised."""

    def cluster(self, within: Any) -> Any:
        """Return what follows a cluster that is launched within a span."""


class _Chosen:
    """The one tracker of this program."""

    tracker: Tracker | None = None


_span: ContextVar[Any] = ContextVar("sparkdl_span", default=None)


def track_by(tracker: Tracker | None) -> None:
    """Have trainings that begin from now on told to `tracker`; to nobody with None."""
    _Chosen.tracker = tracker


def follower_of_launch() -> Any:
    """Return what is to follow a cluster that this thread launches; None for nothing."""
    tracker = _Chosen.tracker
    return None if tracker is None else _guarded(tracker.cluster, _span.get())


@contextmanager
def tracked(kind: Kind, **facts: Any) -> Iterator[Note]:
    """Tell the tracker of a span while it lasts; yields what takes its results, by name."""
    tracker = _Chosen.tracker
    if tracker is None:
        yield lambda **_: None
        return
    span = _guarded(tracker.begin, kind, _span.get(), facts)
    token = _span.set(span)
    try:
        yield partial(_guarded, tracker.note, span)
    except BaseException as error:
        _guarded(tracker.end, span, error)
        raise
    else:
        _guarded(tracker.end, span, None)
    finally:
        _span.reset(token)


def _guarded(call: Callable[..., Any], *arguments: Any, **facts: Any) -> Any:
    try:
        return call(*arguments, **facts)
    except Exception:  # noqa: BLE001 (whatever it is, the training does not need this)
        _log.warning("The tracking of experiments failed; the training goes on", exc_info=True)
        return None
