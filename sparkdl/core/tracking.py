"""The hook for an experiment tracker, such as MLflow; the rest of sparkdl does not know which.

Runs in: driver

A search has trials, a trial or a fit has clusters. Spans nest by the context of the thread that
begins them. A tracker's errors are logged and do not affect the training. Its methods, as those in
`mlflow/tracker.py`, must be quick: they run in the user's thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, Literal

_log = logging.getLogger(__name__)
Kind = Literal["search", "trial", "fit"]
Note = Callable[..., None]


class _Chosen:
    tracker: Any = None


_span: ContextVar[Any] = ContextVar("sparkdl_span", default=None)


def track_by(tracker: Any) -> None:
    """Report trainings that begin from now on to `tracker`; to no tracker if None."""
    _Chosen.tracker = tracker


def follower_of_launch() -> Any:
    tracker = _Chosen.tracker
    return None if tracker is None else _guarded(tracker.cluster, _span.get())


@contextmanager
def tracked(kind: Kind, **facts: Any) -> Iterator[Note]:
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
        _log.warning(
            "The experiment tracker failed, and the training continues; its run may lack entries",
            exc_info=True,
        )
        return None
