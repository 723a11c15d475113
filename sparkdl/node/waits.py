"""Measures how long this process waits: for rows, and for the other nodes in collectives.

A thread looks some twenty times a second at what the main thread does. It finds the same in every
framework, and no call of user code gets slower. Three questions decide about a look:

- Does the main thread wait in a feed, or one that fetches rows for it (as in `tf.data`) while no
  thread runs? Python's frames show it.
- Does the main thread stand in sparkdl's collectives, or in native code that waits for a futex, as
  those of PyTorch, TensorFlow and JAX do? The kernel names a thread's wait (`wchan`). A
  sleep, a file, a socket or a lock of Python's library is the node's own business: it works.
- Does any thread of the process run meanwhile? If so, the node works, whatever its main thread
does.

A GPU's collectives keep the host's threads running, so only waits for rows are known on such a
node; likewise on a node that trains alone, and without `wchan`, as on macOS.
"""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Literal

from sparkdl.control.channel import Waited
from sparkdl.core.errors import FeedClosedError
from sparkdl.core.imports import frames_of_threads
from sparkdl.feed.reader.reader import FeedReader
from sparkdl.node.link import wait_for_nodes

_log = logging.getLogger(__name__)

PERIOD_S = 0.05
"""Between two looks, give or take a half: steps of some length must not hide behind it."""
REPORT_S = 1.0
_LATE_S = 0.01
"""A look that is later than this had to wait for Python's lock: a thread was busy with it."""
_TRIES = 20
_TRY_S = 0.01
_END_S = 5.0
_MAX_DEPTH = 40
_RUNNING = "0"
_OWN = Path(__file__).parent.parent
_STDLIB = os.path.dirname(threading.__file__) + os.sep
_PACKAGES = ("site-packages", "dist-packages")
_OTHERS = tuple(f"{_OWN / name}{os.sep}" for name in ("collectives", "horovod"))
_PRODUCER = os.path.join("tensorflow", "python", "ops", "script_ops.py")
"""A file in the stack of each thread in which TensorFlow calls Python, generators included."""

Doing = Literal["works", "rows", "others", "unknown"]
FrameLocation = Literal["rows", "others", "native", "library"]


class WaitWatch:
    """Watches the thread that enters it, until the thread leaves it.

    Args:
        send: takes the totals every second, in the thread that looks.
        has_others: whether nodes may wait for each other here, and the host's threads show it.
    """

    def __init__(self, send: Callable[[Waited], None], has_others: bool) -> None:
        self._send = send
        self._has_others = has_others
        self._ident, self._main = threading.get_ident(), threading.get_native_id()
        self._totals: dict[Doing, float] = dict.fromkeys(("works", "rows", "others", "unknown"), 0)
        self._reads_kernel = False
        self._is_ready, self._is_over = threading.Event(), threading.Event()
        self._random = random.Random()  # the module's own belongs to user code, which seeds it
        self._thread = threading.Thread(target=self._run, name="sparkdl-waits", daemon=True)

    def __enter__(self) -> WaitWatch:
        """Begin; wait a moment until it is known whether the kernel reports threads' waits."""
        try:
            self._thread.start()
        except RuntimeError as error:  # no further thread
            _log.debug("Waits are not measured: %s", error)
        else:
            self._is_ready.wait(_TRIES * _TRY_S)  # a futex: the thread looks at this very wait
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        if self._thread.ident is not None:
            self._thread.join(_END_S)

    def _run(self) -> None:
        try:
            self._reads_kernel = self._tries_kernel()
            self._has_others = self._has_others and self._reads_kernel
            self._is_ready.set()
            self._watch()
        except FeedClosedError:
            return  # the agent is gone
        except Exception:  # noqa: BLE001 (the training does not need it)
            _log.warning("Waits are no longer measured; the training continues", exc_info=True)
        finally:
            self._is_ready.set()

    def _tries_kernel(self) -> bool:
        """Whether the kernel reports that the main thread waits, as it does now for this one."""
        for _ in range(_TRIES):
            if "futex" in _sleeps_in(self._main):
                return True
            self._is_over.wait(_TRY_S / 2)
        return False

    def _watch(self) -> None:
        last_s = reported_s = time.monotonic()
        is_over = False
        while not is_over:
            wait_s = PERIOD_S * self._random.uniform(0.5, 1.5)
            is_over = self._is_over.wait(wait_s)
            now_s = time.monotonic()
            is_late = now_s - last_s > wait_s + _LATE_S
            self._totals["works" if is_late else self._look()] += now_s - last_s
            last_s = now_s
            if is_over or now_s - reported_s >= REPORT_S:
                reported_s = now_s
                self._send(self.waited())

    def waited(self) -> Waited:
        totals = self._totals
        others_s = totals["others"] if self._has_others else -1.0
        return Waited(sum(totals.values()), totals["rows"], others_s)

    def _look(self) -> Doing:
        frames = frames_of_threads()
        main = frames.pop(self._ident)
        frames.pop(threading.get_ident())
        location = location_of(main)
        if location == "rows":
            return "rows"
        sleeps_in = _sleeps_in(self._main) if self._reads_kernel else ""
        if sleeps_in == _RUNNING or "nanosleep" in sleeps_in:
            return "works"
        beside = {ident: location_of(frame) for ident, frame in frames.items()}
        if "rows" in beside.values():  # as in tf.data, also beside a training of one node
            return "works" if any_runs() else "rows"
        if not self._has_others:
            return "unknown"
        if location == "library" or (location == "native" and "futex" not in sleeps_in):
            return "works"
        # TensorFlow runs generators of rows in threads of its own. One that makes a row is the
        # node's own work, whatever the kernel says of it.
        produces = any(
            location != "others" and is_called_by_tensorflow(frames[ident])
            for ident, location in beside.items()
        )
        return "works" if produces or any_runs() else "others"


def location_of(frame: FrameType | None) -> FrameLocation:
    """Return where a thread stands, seen from its innermost call outwards.

    Returns:
        `rows`: in the wait of a feed. `others`: where sparkdl waits for the other nodes. `native`:
        in native code that any other module has called. `library`: in Python's own library.
    """
    leaf = frame
    for each in _outwards(frame):
        code = each.f_code
        if code is FeedReader.wait_until.__code__:
            return "rows"
        if code is wait_for_nodes.__code__ or code.co_filename.startswith(_OTHERS):
            return "others"
        if not _is_library(code.co_filename):
            return "native" if each is leaf else "library"
    return "library"


def is_called_by_tensorflow(frame: FrameType | None) -> bool:
    return any(each.f_code.co_filename.endswith(_PRODUCER) for each in _outwards(frame))


def any_runs() -> bool:
    """Whether any thread of this process but the caller's runs, or would if it had a core."""
    own = str(threading.get_native_id())
    return any(
        thread != own and _sleeps_in(thread) == _RUNNING for thread in os.listdir("/proc/self/task")
    )


def _sleeps_in(thread: int | str) -> str:
    """Return the kernel's function that a thread sleeps in; "0" if it runs, "" if unknown."""
    try:
        fd = os.open(f"/proc/self/task/{thread}/wchan", os.O_RDONLY)
    except OSError:  # it has ended, or this system has no such file
        return ""
    try:
        return os.read(fd, 100).decode()
    except OSError:
        return ""
    finally:
        os.close(fd)


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    for _ in range(_MAX_DEPTH):
        if frame is None:
            return
        yield frame
        frame = frame.f_back


def _is_library(file: str) -> bool:
    is_in = file.startswith((_STDLIB, "<frozen"))
    return is_in and not any(f"{os.sep}{name}{os.sep}" in file for name in _PACKAGES)
