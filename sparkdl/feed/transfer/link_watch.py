"""Reports hosts of nodes that do not answer a feeder to the driver, and awaits its decision.

Runs in: feeder

TCP retries for many minutes when a link is cut silently, and the feeder's thread may stand in a
call that long. A separate thread therefore tries to connect to the host of each node that owes an
answer. Only silence counts as a failure: the kernel of a host with a busy, paused or dead node
accepts or refuses the connection.

    0 cut ── LATE_S first look ── host_timeout_s of silence: reports to the driver, each second
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from types import TracebackType

from sparkdl.control.cause import CutLink, fetch_cause
from sparkdl.core.deadline import Deadline
from sparkdl.core.settings import Environment
from sparkdl.feed.transfer.messages import FeedSpec, Target, knock

_log = logging.getLogger(__name__)

LATE_S = 2.0
"""Nodes that have owed an answer for so long are looked at."""
_LOOK_S = 1.0
_MIN_LOOKS = 4
"""In a row: a single late look may mean that this process itself stood still."""
_END_S = 1.0
_VERDICT_LOOK_S = 1.0
_SILENT_S = 2.0
"""How long the driver may take to hear from a node why it cannot be reached: it may have failed."""


@dataclass(frozen=True)
class Silence:
    """A host's silence: the number of looks without an answer; the first began at `since_s`.

    Pure.
    """

    since_s: float
    looks: int = 0

    def lasts(self, now_s: float, limit_s: float) -> bool:
        """Whether it is long enough for the driver to decide."""
        return self.looks >= _MIN_LOOKS and now_s - self.since_s >= limit_s


class LinkWatch:
    """Watches a feeder's links until the `with` block ends.

    Args:
        awaited: returns the nodes that owe the feeder an answer; called in the watch's thread.
    """

    def __init__(self, spec: FeedSpec, awaited: Callable[[], Iterable[Target]]) -> None:
        self._spec = spec
        self._awaited = awaited
        self._silences: dict[str, Silence] = {}
        self._own_host = Environment.read().node_host or ""
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="sparkdl-links", daemon=True)

    def __enter__(self) -> LinkWatch:
        if self._spec.coordinator and self._spec.host_timeout_s:
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._has_ended.set()
        if self._thread.ident is not None:
            self._thread.join(_END_S)  # it may be in a look, and ends after that

    def _watch(self) -> None:
        looked_s = time.monotonic()
        # From look to look, not from end to look: a look takes up to a second for each silent
        # host.
        while not self._has_ended.wait(max(0.0, looked_s + _LOOK_S - time.monotonic())):
            looked_s = time.monotonic()
            # One look a host: its kernel answers for all its nodes.
            hosts = {target.host: target for target in self._awaited()}
            # A host that owes nothing any more may fall silent later, as if for the first time.
            self._silences = {h: s for h, s in self._silences.items() if h in hosts}
            for target in hosts.values():
                self._look(target)

    def _look(self, target: Target) -> None:
        began_s = time.monotonic()
        if knock(target) != "silent":
            self._silences.pop(target.host, None)
            return
        before = self._silences.get(target.host, Silence(began_s))
        silence = self._silences[target.host] = replace(before, looks=before.looks + 1)
        limit_s = self._spec.host_timeout_s
        if not silence.lasts(time.monotonic(), limit_s) or self._has_ended.is_set():
            return
        if not before.lasts(began_s, limit_s):
            _log.warning(
                "%s at %s has not answered for %.0f s; its rows are held for the driver's decision",
                *(target.name, target.host, time.monotonic() - silence.since_s),
            )
        spec, cut = self._spec, CutLink(self._spec.generation, target.node_id, self._own_host)
        with suppress(OSError):  # this host itself is cut off, perhaps
            fetch_cause(spec.coordinator, spec.token, spec.trust, cut)


def await_decision(spec: FeedSpec, targets: Sequence[Target], error: Exception) -> str:
    """Wait until nodes can be reached again, or the driver has decided what follows.

    If the driver gives a host up, Spark cancels this task's job meanwhile. A task that failed at
    once would use up its four attempts before that. `LinkWatch` reports silent hosts to the driver.
    As long as the driver answers, it will decide, so the task waits on.

    Returns:
        Why the cluster has failed, as far as the driver knows: a node that has raised cannot be
        reached either. Empty otherwise.
    """
    at_last, never = Deadline.after(spec.timeout_s), threading.Event()
    silence: Deadline | None = Deadline.after(_SILENT_S)
    deadline = Deadline.after(2 * spec.host_timeout_s)
    while not deadline.has_passed and not at_last.has_passed:
        found = {knock(target) for target in targets}
        if found == {"accepts"}:
            return ""
        with suppress(OSError):  # this host itself is cut off, perhaps
            if (cause := fetch_cause(spec.coordinator, spec.token, spec.trust)) != "":
                return cause or ""
            if "silent" in found:
                deadline = Deadline.after(2 * spec.host_timeout_s)
        if silence is not None and silence.has_passed:
            silence = None
            _log.warning("%s; waiting for the driver's decision", error)
        never.wait(min(_VERDICT_LOOK_S, deadline.remaining_s))
    return ""
