"""Looks at what this process does for a while, from a thread of its own.

Runs in: child

The framework's own profiler runs; or this samples: Python's stacks, a hundred times a second.
Stacks are counted, not kept, so a longer profile takes no more memory. While C code holds the
interpreter's lock the sampler cannot run; this time counts for the next stack it finds.

Why not py-spy? It needs a privilege (SYS_PTRACE) that containers mostly lack.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import PurePath
from types import FrameType

from sparkdl.control.channel import TakeProfile
from sparkdl.control.messages import Profiled
from sparkdl.core.errors import FeedClosedError
from sparkdl.core.garbage import frames_of_threads
from sparkdl.frameworks.framework import framework_named

_log = logging.getLogger(__name__)
_Place = tuple[str, str, int | None]

PERIOD_S = 0.01
_MAX_NCHARS = 1 << 20
"""The limit for all distinct stacks: they go to the driver in one message."""
_MAX_DEPTH = 200
_FURTHER = "(further stacks)"
_LAST_S = 5.0
"""The end of `map_fun` waits so long for a profile to be written."""


class Profiler:
    """Takes one profile at a time.

    Args:
        send: takes the answers, in any thread.

    Attributes:
        is_in_map_fun: before that no framework's profiler may begin: it could set the framework up
            in another way than the world needs.
    """

    def __init__(self, send: Callable[[Profiled], None]) -> None:
        self._send = send
        self.is_in_map_fun = False
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, asked: TakeProfile) -> None:
        """Take a profile in a thread, and send it."""
        if self._thread is not None and self._thread.is_alive():
            self._send(Profiled(asked.request, problem="another profile is being taken"))
            return
        self._thread = threading.Thread(
            target=self._take, args=(asked,), name="sparkdl-profile", daemon=True
        )
        try:
            self._thread.start()
        except RuntimeError as error:  # no further thread
            self._thread = None
            self._send(Profiled(asked.request, problem=str(error)))

    def end(self) -> None:
        """End a running profile now: `map_fun` has returned."""
        self._is_over.set()
        if self._thread is not None:
            self._thread.join(_LAST_S)

    def _take(self, asked: TakeProfile) -> None:
        try:
            if asked.tool:
                answer = self._traced(asked)
            else:
                answer = Profiled(asked.request, sampled(asked.until_s, self._is_over))
        except Exception as error:  # noqa: BLE001 (the training does not need it)
            _log.debug("There is no profile", exc_info=True)
            answer = Profiled(asked.request, problem=f"{type(error).__name__}: {error}")
        with suppress(FeedClosedError):
            self._send(answer)

    def _traced(self, asked: TakeProfile) -> Profiled:
        seconds = asked.until_s - time.monotonic()  # to begin may take some as well
        if asked.tool not in sys.modules:
            problem = f"{asked.tool} is not imported in this process"
            return Profiled(asked.request, problem=problem)
        if not self.is_in_map_fun:
            return Profiled(asked.request, problem="map_fun has not begun")
        os.makedirs(asked.folder, exist_ok=True)
        with framework_named(asked.tool).tracing(asked.folder):
            self._is_over.wait(seconds)
        return Profiled(asked.request, folder=asked.folder)


def sampled(until_s: float, is_over: threading.Event) -> dict[str, int]:
    """Return for how many periods each stack of the other threads was seen.

    Args:
        until_s: by the monotonic clock.
        is_over: ends it earlier.
    """
    counts: Counter[str] = Counter()
    texts: dict[_Place, str] = {}
    left, last_s = _MAX_NCHARS, time.monotonic()
    while last_s < until_s and not is_over.wait(PERIOD_S):
        # A late look counts for the periods that it has missed.
        periods = int((min(time.monotonic(), until_s) - last_s) / PERIOD_S + 0.5)
        last_s += max(periods, 1) * PERIOD_S
        for stack in _stacks(texts):
            if stack not in counts:
                left -= len(stack)
            counts[stack if stack in counts or left >= 0 else _FURTHER] += max(periods, 1)
    return dict(counts)


def _stacks(texts: dict[_Place, str]) -> Iterator[str]:
    """Yield the stacks of the other threads; the text of each call is made once."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, frame in frames_of_threads().items():
        if ident == threading.get_ident():
            continue
        calls: list[str] = []
        call: FrameType | None = frame
        while call is not None and len(calls) < _MAX_DEPTH:
            code = call.f_code
            name = getattr(code, "co_qualname", code.co_name)  # from Python 3.11 on
            place = code.co_filename, name, call.f_lineno
            if place not in texts:
                file = "/".join(PurePath(code.co_filename).parts[-2:])
                texts[place] = _clean(f"{name} ({file}:{call.f_lineno})")
            calls.append(texts[place])
            call = call.f_back
        yield ";".join([_clean(names.get(ident, "(no name)")), *calls[::-1]])


def _clean(name: str) -> str:
    return " ".join(name.replace(";", ",").split())
