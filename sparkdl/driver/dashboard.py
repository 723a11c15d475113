"""The records of this program's clusters, and the dashboard's process, which reads them.

One process serves the pages of all clusters of a program, from the first launch to the program's
end. It is given the names of the records, so a dashboard that crashes or hangs harms no training.
In the driver's own process Bokeh's server would share its interpreter lock, and its faults.
"""

from __future__ import annotations

import atexit
import logging
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

from sparkdl.control.ports import listening_socket
from sparkdl.core.errors import ConfigError, FrameworkMissingError
from sparkdl.core.settings import Environment
from sparkdl.core.world import host_port
from sparkdl.driver.controller import Controller
from sparkdl.driver.events import (
    SUFFIX,
    Changed,
    Checkpoint,
    Ended,
    Event,
    Launched,
    Sampled,
    line_of,
)
from sparkdl.driver.stream import PERIOD_S

_log = logging.getLogger(__name__)

_DENSE_S = 3600.0
"""Until then a record has all samples, later fewer and fewer: so files stay small."""
_REST_S = 10.0
_MAX_EVENTS = 100_000
"""Waiting while nothing can be written; the oldest are dropped."""
_RECORD_S = 1.0
"""How long the cluster's end may wait for the last events to be written."""
_END_S = 5.0


class Recorder(threading.Thread):
    """Writes the events of one cluster to the file `path`, in a thread: a disk may hang."""

    def __init__(self, controller: Controller, folder: str) -> None:
        cluster = controller.spec.cluster_id
        super().__init__(name=f"sparkdl-record-{cluster}", daemon=True)
        self.path = Path(folder, f"{cluster}{SUFFIX}")
        self._file = self.path.open("xb")
        self._begun_s = self._kept_s = controller.events.begun_s
        self._events: deque[Event] = deque(maxlen=_MAX_EVENTS)
        self._ends = threading.Event()
        controller.events.subscribe(self._put, Launched, Changed, Checkpoint, Sampled, Ended)

    def _put(self, event: Event) -> None:
        """Take an event; on any thread. With the last one, wait for a limited time."""
        if not isinstance(event, Ended):
            self._events.append(event)
            return
        self._ends.set()
        if self.is_alive():
            self.join(_RECORD_S)

    def run(self) -> None:
        try:
            has_ended = False
            while not has_ended:
                has_ended = self._ends.wait(PERIOD_S)
                self._write([self._events.popleft() for _ in range(len(self._events))], has_ended)
        except Exception:  # noqa: BLE001 (whatever it is, the training does not need this)
            _log.exception(
                "The record %s ends here after an error; the cluster continues", self.path
            )
        finally:
            # Later events are dropped, or they would fill the memory of the driver.
            self._events = deque(maxlen=0)
            with suppress(OSError):  # it flushes again
                self._file.close()

    def _write(self, events: Sequence[Event], is_last: bool) -> None:
        """Write the events; of samples the fewer the longer it trains, and the last one."""
        for event in events:
            if isinstance(event, Sampled):
                rest_s = min(_REST_S, (event.time_s - self._begun_s) / _DENSE_S)
                if event.time_s - self._kept_s < rest_s and not is_last:
                    continue
                self._kept_s = event.time_s
            self._file.write(line_of(event))
        self._file.flush()


def folder_of_records(folder: str | os.PathLike[str]) -> str:
    """Make a folder of this machine if it is not there, and return its absolute path."""
    text = os.fspath(folder) if isinstance(folder, (str, os.PathLike)) else ""
    if not text:
        raise ConfigError(f"record={folder!r}: give the path of a folder")
    found = urlsplit(text)
    if found.scheme not in ("", "file") or found.netloc:
        raise ConfigError(
            f"record={text!r} is a URL, and must be a path on the driver's machine, because lines "
            "are appended to its files: give, for example, the path where that storage is mounted"
        )
    own = os.path.abspath(os.path.expanduser(found.path if found.scheme else text))
    try:
        os.makedirs(own, exist_ok=True)
        with tempfile.TemporaryFile(dir=own, buffering=0) as probe:
            # A full disk still creates files. Only their first block fails.
            probe.write(bytes(4096))
    except OSError as error:
        raise ConfigError(
            f"record={text!r} cannot be written to on the driver's machine: "
            f"{error.strerror}. Choose another folder, or leave record out"
        ) from error
    return own


class Dashboard:
    """The process that serves the pages of all clusters of this program.

    Attributes:
        url: where they are, with the token that opens them.
        folder: for records that only the pages read.
    """

    def __init__(self, host: str, ports: tuple[int, ...], prefix: str) -> None:
        self._lock = threading.Lock()
        token = secrets.token_urlsafe(24)
        # A single port is the user's choice, perhaps a proxy's. From a range any port may follow.
        ports = ports if len(ports) == 1 else (*ports, 0)
        listening = listening_socket(host, ports, "the dashboard", "SPARKDL_DASHBOARD")
        with listening as listener:
            # The driver opens the port and hands it over, so the address is known at once.
            port, fd = listener.getsockname()[1], listener.fileno()
            self._process = subprocess.Popen(
                [sys.executable, "-m", "sparkdl.dashboard.server", str(fd), prefix],
                stdin=subprocess.PIPE,
                pass_fds=[fd],
                start_new_session=True,  # Ctrl-C in a notebook or a terminal is not meant for it
            )
        # For the records of launches that keep none; the process deletes it if this one is killed.
        self.folder = tempfile.mkdtemp(prefix="sparkdl-records-")
        # Through standard input: other users of this machine can read command lines.
        self._tell(token)
        self._tell(self.folder)
        self.url = f"http://{host_port(host, port)}{prefix}/?token={token}"
        atexit.register(self.close)

    @property
    def is_there(self) -> bool:
        return self._process.poll() is None

    def show(self, record: Path) -> None:
        """Have the pages show a record, as it grows."""
        self._tell(os.fspath(record.absolute()))

    def close(self) -> None:
        atexit.unregister(self.close)
        self._process.kill()  # it has nothing to lose
        self._process.wait(_END_S)
        with suppress(OSError):
            self._process.stdin.close()  # type: ignore[union-attr]
        shutil.rmtree(self.folder, ignore_errors=True)

    def _tell(self, line: str) -> None:
        assert self._process.stdin
        with self._lock, suppress(OSError):  # the process has exited
            self._process.stdin.write(os.fsencode(f"{line}\n"))
            self._process.stdin.flush()


def is_available() -> bool:
    return find_spec("bokeh") is not None


def dashboard_of_program(wanted: bool | None, host: str) -> Dashboard | None:
    """Return the dashboard of this program, started if there is none yet.

    Args:
        wanted: None for one if it is installed, unless SPARKDL_DASHBOARD=0 says otherwise.
        host: the address that it listens at.
    """
    is_wanted = Environment.read().dashboard and is_available() if wanted is None else wanted
    if not is_wanted:
        return None
    if not is_available():
        raise FrameworkMissingError("dashboard=True: bokeh is not installed: pip install bokeh")
    try:
        with _lock:
            if not _running or not _running[0].is_there:
                found = Environment.read()
                host = found.dashboard_host or host
                _running[:] = [Dashboard(host, found.dashboard_ports, found.dashboard_prefix)]
            return _running[0]
    except (OSError, ConfigError) as error:
        # By default a launch must not fail for want of a dashboard.
        if wanted:
            raise
        _log.warning("Continuing without a dashboard: %s", error)
        return None


_lock = threading.Lock()
_running: list[Dashboard] = []
"""The one dashboard of this program, if there is one."""
