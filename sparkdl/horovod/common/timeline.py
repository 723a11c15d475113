"""`hvd.start_timeline` and `hvd.stop_timeline`: a file of what rank 0 does.

Runs in: child

https://horovod.readthedocs.io/en/stable/timeline_include.html
"""

from __future__ import annotations

from sparkdl.control.trace_file import Event, TraceFile, TrackIds, complete, named_process
from sparkdl.core import trace
from sparkdl.core.errors import ConfigError
from sparkdl.horovod.common.process_sets import place

_PERIOD_S = 0.5
_PID = 1


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Write what rank 0 does into a file of its host, from now on; all processes may call this.

    `Observe(timeline=…)`, and the variable `HOROVOD_TIMELINE` where the training is started,
    write one of all processes.

    Args:
        mark_cycles: accepted; sparkdl has no cycles.

    Raises:
        ConfigError: if the file cannot be written, or a timeline is written already.
    """
    if place().rank != 0:
        return
    if _active:
        raise ConfigError(
            f"hvd.start_timeline({file_path!r}): {_active[0].path} is written already; call "
            "hvd.stop_timeline() first"
        )
    try:
        timeline = _Timeline(file_path)
    except OSError as error:
        raise ConfigError(
            f"hvd.start_timeline({file_path!r}): {error}. Give a file that rank 0 can write"
        ) from error
    _active.append(timeline)
    timeline.pump = trace.start(timeline.take, _PERIOD_S)


def stop_timeline() -> None:
    """End the file; without one this does nothing."""
    while _active:
        timeline = _active.pop()
        trace.stop(timeline.pump)
        timeline.close()


class _Timeline:
    """A file of what this process does."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.pump: trace.Pump | None = None
        self._file = TraceFile(path)
        self._ids = TrackIds()
        self._zero_us = trace.now_us()
        self._dropped = 0
        self._news: list[Event] = [*named_process("rank 0", _PID, 0)]

    def take(self, spans: tuple[trace.Span, ...], dropped: int, threads: dict[int, str]) -> None:
        """Write spans."""
        events, self._news = self._news, []
        for span in spans:
            name = threads.get(span.track, "thread") if isinstance(span.track, int) else ""
            events += self._ids.named(_PID, span.track, name)
            tid, start_us = self._ids.tid(_PID, span.track), span.start_us - self._zero_us
            # A span may have begun before the file: only its part from then on is shown.
            at = (_PID, tid, max(0, start_us), span.duration_us + min(0, start_us))
            events.append(complete(span.name, span.category, *at, span.args))
        self._dropped += dropped
        self._file.write(events, (), {"dropped_spans": self._dropped})

    def close(self) -> None:
        """Close the file."""
        self._file.close()


_active: list[_Timeline] = []
"""The one that is written, if any."""
