"""Spans of a process's work, kept in bounded rings until background threads send them on.

Runs in: anywhere

Without a running `Pump` nothing is recorded, and `span` and `add` cost one look at a variable.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

_log = logging.getLogger(__name__)

_SPANS_PER_S = 20_000
"""The limit for all nodes together: one driver handles this many without harm."""
_MIN_CAPACITY = 200
_END_S = 5.0
_MAX_CHARS = 200
Value = int | float | str
Take = Callable[[tuple["Span", ...], int, dict[int, str]], None]
"""Receives spans, the number of dropped ones, and the threads' names by native id."""


class Span(NamedTuple):
    """Something that has taken time.

    Attributes:
        track: the native id of its thread, or the name of a track.
        start_us: on this host's monotonic clock, common to all its processes.
        args: what else is known of it.
    """

    category: str
    name: str
    track: int | str
    start_us: int
    duration_us: int
    args: dict[str, Value] = {}  # noqa: RUF012 (never changed)


class Ring:
    """The latest spans of all threads; counts the dropped ones."""

    def __init__(self, capacity: int) -> None:
        self._spans: deque[Span] = deque(maxlen=capacity)
        self._dropped = 0
        self._lock = threading.Lock()

    def add(self, span: Span) -> None:
        """Keep a span; the oldest goes if there is no room."""
        with self._lock:
            # A full deque drops its oldest entry without a sign, so the loss is counted before
            # `append`.
            self._dropped += len(self._spans) == self._spans.maxlen
            self._spans.append(span)

    def take(self) -> tuple[tuple[Span, ...], int]:
        """Return what there is, and how many have been dropped since the last call."""
        with self._lock:
            taken = tuple(self._spans), self._dropped
            self._spans.clear()
            self._dropped = 0
        return taken


class Pump(threading.Thread):
    """Sends a ring's spans on periodically, until sending fails for the first time.

    Args:
        take: called in this thread, and by `close`.
    """

    def __init__(self, take: Take, period_s: float, capacity: int) -> None:
        super().__init__(name="sparkdl-trace", daemon=True)
        self.ring = Ring(capacity)
        self._take, self._period_s = take, period_s
        self._ends = threading.Event()
        self._has_failed = False

    def run(self) -> None:
        """Pass on, until `close`."""
        while not self._ends.wait(self._period_s):
            self._pass_on()

    def close(self) -> None:
        """Send the remaining spans."""
        self._ends.set()
        self.join(_END_S)
        # Only one thread may be in `take`. A thread that hangs in it past the limit loses the last
        # spans.
        if not self.is_alive():
            self._pass_on()

    def _pass_on(self) -> None:
        spans, dropped = self.ring.take()
        if self._has_failed or not (spans or dropped):
            return
        try:
            names = {thread.native_id: thread.name for thread in threading.enumerate()}
            self._take(spans, dropped, {number: name for number, name in names.items() if number})
        except Exception as error:  # noqa: BLE001 (whatever it is, the training does not need this)
            self._has_failed = True
            _log.warning(
                "The timeline of this process ends here, and the training continues: %s", error
            )


# Replaced as a whole, never changed: `add` reads it in any thread without a lock.
_pumps: tuple[Pump, ...] = ()


def start(take: Take, period_s: float, nodes: int = 1) -> Pump:
    """Keep spans from now on, and pass them on every `period_s` seconds.

    Args:
        nodes: how many processes do so for the same taker.
    """
    global _pumps
    pump = Pump(take, period_s, max(_MIN_CAPACITY, int(_SPANS_PER_S * period_s / nodes)))
    pump.start()
    _pumps = (*_pumps, pump)
    return pump


def stop(pump: Pump | None = None) -> None:
    """Record no more spans for `pump`, by default for all pumps; send the remaining ones."""
    global _pumps
    ending = _pumps if pump is None else (pump,)
    _pumps = tuple(each for each in _pumps if each not in ending)
    for each in ending:
        each.close()


def _forget() -> None:
    global _pumps
    _pumps = ()


os.register_at_fork(after_in_child=_forget)  # the threads have stayed behind, locks perhaps locked


def is_on() -> bool:
    """Whether spans are kept."""
    return bool(_pumps)


def now_us() -> int:
    """Return the time in microseconds, by this host's clock that does not jump."""
    return time.monotonic_ns() // 1000


def add(
    category: str,
    name: str,
    start_us: int,
    stop_us: int | None = None,
    track: str | None = None,
    args: Mapping[str, Any] | None = None,
) -> None:
    """Keep a span that has ended.

    Args:
        stop_us: by default now.
        track: by default this thread's.
        args: anything; values that are not numbers become text.
    """
    if not _pumps:
        return
    stop_us = now_us() if stop_us is None else stop_us
    where = threading.get_native_id() if track is None else track
    kept = {_text(key): _plain(value) for key, value in args.items()} if args else {}
    span = Span(category, _text(name), where, start_us, max(0, stop_us - start_us), kept)
    for pump in _pumps:
        pump.ring.add(span)


def span(
    category: str, name: str, track: str | None = None, **args: Any
) -> AbstractContextManager[None]:
    """Record a span around the block; for the arguments see `add`."""
    return _Open(category, name, track, args) if _pumps else _OFF


_OFF: AbstractContextManager[None] = nullcontext()


class _Open(AbstractContextManager[None]):
    """A span that has begun."""

    def __init__(self, category: str, name: str, track: str | None, args: dict[str, Any]) -> None:
        self._span = category, name
        self._track, self._args = track, args
        self._start_us = 0

    def __enter__(self) -> None:
        self._start_us = now_us()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and issubclass(kind, Exception):
            self._args = {**self._args, "error": kind.__name__}
        add(*self._span, self._start_us, None, self._track, self._args)


def _plain(value: Any) -> Value:
    """Return what JSON can carry of a value."""
    if isinstance(value, int):
        # Viewers in a browser read numbers as doubles, which hold integers exactly up to 2**53.
        return int(value) if abs(value) < 1 << 53 else str(value)
    if isinstance(value, float) and math.isfinite(value):
        return float(value)
    return _text(value)


def _text(value: Any) -> str:
    if type(value) is str and value.isascii() and len(value) <= _MAX_CHARS:
        return value
    try:
        text = str(value)
    except Exception as error:  # noqa: BLE001 (the user's own class)
        text = f"<{type(value).__name__}: {type(error).__name__}>"
    # A lone surrogate, as in file names that are no UTF-8, could not be encoded later.
    return text[:_MAX_CHARS].encode(errors="replace").decode()
