"""A file in Chrome's Trace Event Format, which Perfetto shows; complete after each write.

Runs in: driver, child

Each write ends the JSON, and the next one overwrites that end. The writer may therefore be killed
at any time. A file called `.gz` is one stream of gzip: before its end is written, the state of the
compression is copied, and the next events continue from the copy.

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, Protocol

import msgspec

Event = dict[str, Any]
_encode = msgspec.json.Encoder().encode
_GZIP = 31
"""`wbits` of zlib for a header and a trailer of gzip."""
_NAMED = 1 << 22
"""Tracks with names have ids from here on: no thread of Linux has such an id."""


class TraceFile:
    """One trace, whose opener calls `close`. Opening truncates an existing file.

    Raises:
        OSError: if it cannot be opened; from all methods but `close`, if it cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self._body: _Body = _Deflated() if self.path.endswith(".gz") else _Plain()
        # Without a buffer: written events must be in the file when this process is killed.
        self._file = open(self.path, "wb", buffering=0)  # noqa: SIM115 (`close`)
        self._stop = 0
        self._is_first = True
        self._end = b""
        try:
            self._put(b'{"displayTimeUnit":"ms","traceEvents":[\n', b"\n]}\n")
        except BaseException:
            self.close()
            raise

    def write(
        self, events: Iterable[Event], open_events: Iterable[Event], other: Mapping[str, Any]
    ) -> None:
        """Append events. If that fails, nothing more can be written.

        Args:
            open_events: spans that have not ended yet, as of now; the next write replaces them.
            other: of the whole trace, likewise.
        """
        lines = self._lines(events)
        self._is_first = self._is_first and not lines
        self._put(lines, self._lines(open_events) + b'\n],"otherData":' + _encode(other) + b"}\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _lines(self, events: Iterable[Event]) -> bytes:
        lines = b",\n".join(map(_encode, events))
        return lines if self._is_first or not lines else b",\n" + lines

    def _put(self, data: bytes, end: bytes) -> None:
        data = self._body.add(data) if data else b""
        try:
            self._write_at(self._stop, data + self._body.ended(end))
        except OSError:
            with suppress(OSError):  # the file has room for this, where its end was
                self._write_at(self._stop, self._end)
            raise
        # Only after the write: if it fails, the previous end stays in force.
        self._stop += len(data)
        self._end = self._body.ended(b"\n]}\n")

    def _write_at(self, start: int, data: bytes) -> None:
        self._file.seek(start)
        left = memoryview(data)
        while left:
            left = left[self._file.write(left) or 0 :]
        self._file.truncate()


class _Body(Protocol):
    def add(self, data: bytes) -> bytes:
        """Return the bytes to append for `data`."""

    def ended(self, data: bytes) -> bytes:
        """Return the bytes with which the file ends, if `data` is its end; `add` goes on before."""


class _Plain:
    def add(self, data: bytes) -> bytes:
        return data

    def ended(self, data: bytes) -> bytes:
        return data


class _Deflated:
    def __init__(self) -> None:
        self._deflater = zlib.compressobj(wbits=_GZIP)

    def add(self, data: bytes) -> bytes:
        # A sync flush makes zlib give out all bytes of `data`, so that the end can follow them.
        return self._deflater.compress(data) + self._deflater.flush(zlib.Z_SYNC_FLUSH)

    def ended(self, data: bytes) -> bytes:
        copy = self._deflater.copy()
        return copy.compress(data) + copy.flush()


def complete(
    name: str, category: str, pid: int, tid: int, start_us: int, duration_us: int, args: Any = None
) -> Event:
    """Return the event of a span."""
    event = {"ph": "X", "name": name, "cat": category, "pid": pid, "tid": tid}
    return {**event, "ts": start_us, "dur": duration_us, **({"args": args} if args else {})}


def instant(name: str, category: str, pid: int, tid: int, time_us: int, args: Any = None) -> Event:
    """Return the event of something that takes no time."""
    event = {"ph": "i", "s": "p", "name": name, "cat": category, "pid": pid, "tid": tid}
    return {**event, "ts": time_us, **({"args": args} if args else {})}


def named_process(name: str, pid: int, order: int) -> tuple[Event, Event]:
    """Return the events that name a process and give its place in the viewer."""
    at = {"ph": "M", "pid": pid, "tid": 1, "ts": 0}
    return (
        {**at, "name": "process_name", "args": {"name": name}},
        {**at, "name": "process_sort_index", "args": {"sort_index": order}},
    )


class TrackIds:
    """The ids of tracks: of a thread its own, of a name one that no thread has."""

    def __init__(self) -> None:
        self._ids: dict[tuple[int, str | int], int] = {}

    def tid(self, pid: int, track: str | int) -> int:
        """Return the id of a track that has been `named`."""
        return self._ids[pid, track]

    def named(self, pid: int, track: str | int, name: str = "") -> Iterator[Event]:
        """Yield the events that name a track, once; those with names of their own come first."""
        if (pid, track) in self._ids:
            return
        is_thread = isinstance(track, int)
        tid = track if isinstance(track, int) else _NAMED + len(self._ids)
        self._ids[pid, track] = tid
        at = {"ph": "M", "pid": pid, "tid": tid, "ts": 0}
        yield {**at, "name": "thread_name", "args": {"name": name or str(track)}}
        order = len(self._ids) + is_thread * _NAMED
        yield {**at, "name": "thread_sort_index", "args": {"sort_index": order}}
