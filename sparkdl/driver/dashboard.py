"""Sends the events of this program's clusters to the dashboard's process and to record files.

One process serves the pages of all clusters of a program, from the first launch to the program's
end. A thread here writes the latest events to it once a second. No cluster waits for either of
them, so a dashboard that crashes or hangs harms no training. In the driver's own process Bokeh's
server would share its interpreter lock, and its faults.
"""

from __future__ import annotations

import atexit
import logging
import secrets
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import IO

from sparkdl.control.ports import listening_socket
from sparkdl.core.deadline import Deadline
from sparkdl.core.errors import ConfigError, FrameworkMissingError
from sparkdl.core.settings import Environment
from sparkdl.core.world import host_port
from sparkdl.driver.controller import Controller
from sparkdl.driver.events import (
    SUFFIX,
    AnyEvent,
    AskLog,
    Changed,
    Checkpoint,
    Ended,
    Event,
    Launched,
    Printed,
    Sampled,
    Stacks,
    ask_of,
    line_of,
)
from sparkdl.driver.stream import PERIOD_S, Batches

_log = logging.getLogger(__name__)

_KEPT = 3600
"""Samples in a record of the first hour; of each later time as many, so that files stay small."""
_ANSWER_S = 5.0
_END_S = 5.0


class Recorder(Batches):
    """Writes the events of one cluster to a file, to the dashboard's process, or to both.

    Args:
        folder: folder for the record file, if there is to be one.
        dashboard: the dashboard to show it, if there is to be one.

    Raises:
        OSError: if the file cannot be made.
    """

    def __init__(
        self, controller: Controller, folder: str | None, dashboard: Dashboard | None
    ) -> None:
        spec = controller.spec
        name = f"sparkdl-recorder-{spec.cluster_id}"
        super().__init__(f"The record of cluster {spec.cluster_id}", name, PERIOD_S)
        self._controller = controller
        self._file: IO[bytes] | None = None
        if folder is not None:
            self._file = Path(folder, f"{spec.cluster_id}{SUFFIX}").open("xb")  # noqa: SIM115 (`_finish`)
        self._dashboard = dashboard
        self._kept_s = controller.events.begun_s
        self._last: Sampled | None = None
        """The last sample, if it is not in the file."""
        if dashboard:
            dashboard.add(controller)
        controller.events.subscribe(self.put, Launched, Changed, Checkpoint, Sampled, Ended)

    def _take(self, events: Sequence[Event], is_last: bool) -> None:
        lines = []
        for event in events:
            if not isinstance(event, Ended):
                lines.append(line_of(event))
                self._keep(event, lines[-1])
        # The record ends with the last sample, however far apart samples are by then.
        if is_last and self._last is not None:
            self._write(line_of(self._last))
        if self._dashboard:
            # Last, because it blocks while the dashboard's process does not read.
            self._dashboard.write(b"".join(lines))

    def _keep(self, event: Event, line: bytes) -> None:
        """Write to the file; of samples the fewer the longer it trains."""
        self._last = None
        if isinstance(event, Sampled):
            rest_s = (event.time_s - self._controller.events.begun_s) / _KEPT
            if event.time_s - self._kept_s < rest_s:
                self._last = event
                return
            self._kept_s = event.time_s
        self._write(line)

    def _write(self, line: bytes) -> None:
        if self._file is None:
            return
        try:
            self._file.write(line)
            self._file.flush()
        except OSError as error:
            cluster = self._controller.spec.cluster_id
            _log.warning(
                "The record of cluster %s ends here: %s. The training continues; make room, or "
                "give record= another folder",
                cluster,
                error,
            )
            self._close()

    def _finish(self) -> None:
        if self._dashboard:
            self._dashboard.remove(self._controller)
        self._close()

    def _close(self) -> None:
        if self._file is not None:
            with suppress(OSError):
                self._file.close()
            self._file = None


class Dashboard:
    """The process that serves the pages of all clusters of this program.

    Attributes:
        url: where they are, with the token that opens them.
    """

    def __init__(self, host: str, ports: tuple[int, ...], prefix: str) -> None:
        self._controllers: dict[str, Controller] = {}
        self._lock = threading.Lock()
        self._is_closed = False
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
                stdout=subprocess.PIPE,
                pass_fds=[fd],
                start_new_session=True,  # Ctrl-C in a notebook or a terminal is not meant for it
            )
        # Through standard input: other users of this machine can read command lines.
        self.write(f"{token}\n".encode())
        self.url = f"http://{host_port(host, port)}{prefix}/?token={token}"
        self._thread = threading.Thread(
            target=self._answer_all, name="sparkdl-dashboard", daemon=True
        )
        self._thread.start()
        atexit.register(self.close)

    @property
    def is_there(self) -> bool:
        """Whether its process runs."""
        return not self._is_closed and self._process.poll() is None

    def add(self, controller: Controller) -> None:
        """Answer the pages' questions about a cluster."""
        self._controllers[controller.spec.cluster_id] = controller

    def remove(self, controller: Controller) -> None:
        """Answer no more: the cluster has ended."""
        self._controllers.pop(controller.spec.cluster_id, None)

    def write(self, lines: bytes) -> None:
        """Send lines to the process; block while it does not read."""
        assert self._process.stdin
        # Several clusters write, each in its recorder's thread.
        with self._lock:
            try:
                self._process.stdin.write(lines)
                self._process.stdin.flush()
            except (OSError, ValueError):
                if not self._is_closed:
                    self._is_closed = True
                    _log.warning(
                        "The dashboard's process has exited, and clusters continue without it. "
                        "Launch again for a new one"
                    )

    def close(self) -> None:
        """End the process."""
        self._is_closed = True
        atexit.unregister(self.close)
        self._process.kill()  # it has nothing to lose
        self._process.wait(_END_S)
        self._thread.join(_END_S)

    def _answer_all(self) -> None:
        assert self._process.stdout
        for line in self._process.stdout:
            try:
                self._answer(line)
            except Exception:  # noqa: BLE001 (whatever it is, the next one may be answered)
                _log.exception("A question of the dashboard was not answered")
        # Under the lock: a recorder may be writing.
        with self._lock, suppress(OSError):
            self._process.stdin.close()  # type: ignore[union-attr]
        self._process.stdout.close()

    def _answer(self, line: bytes) -> None:
        asked = ask_of(line)
        controller = self._controllers.get(asked.cluster)
        if controller is None:
            return
        deadline = Deadline.after(_ANSWER_S)
        answer: AnyEvent
        if isinstance(asked, AskLog):
            lines = controller.questions.fetch_log(asked.node_id, asked.lines, deadline)
            answer = Printed(asked.cluster, controller.events.now_s(), asked.node_id, lines)
        else:
            answer = Stacks(
                asked.cluster,
                controller.events.now_s(),
                controller.questions.fetch_stacks(deadline),
            )
        self.write(line_of(answer))


def is_available() -> bool:
    """Whether Bokeh, which serves the pages, is installed."""
    return find_spec("bokeh") is not None


def dashboard_of_program(wanted: bool | None, host: str) -> Dashboard | None:
    """Return the dashboard of this program, started if there is none yet.

    Args:
        wanted: None for one if it is installed, unless SPARKDL_DASHBOARD=0 says otherwise.
        host: the address that it listens at.

    Raises:
        FrameworkMissingError: if it is asked for and not installed.
        ConfigError: if it is asked for, and an environment variable makes no sense, or nothing can
            listen at `host`.
        OSError: if it is asked for, and its process cannot be started.
    """
    if wanted is None and not (Environment.read().dashboard and is_available()):
        return None
    if wanted is False:
        return None
    if not is_available():
        raise FrameworkMissingError("dashboard=True: bokeh is not installed: pip install bokeh")
    try:
        return _running_dashboard(host)
    except (OSError, ConfigError) as error:
        # By default a launch must not fail for want of a dashboard.
        if wanted:
            raise
        _log.warning("There is no dashboard: %s", error)
        return None


_lock = threading.Lock()
_running: list[Dashboard] = []
"""The one dashboard of this program, if there is one."""


def _running_dashboard(host: str) -> Dashboard:
    with _lock:
        if not _running or not _running[0].is_there:
            found = Environment.read()
            host = found.dashboard_host or host
            _running[:] = [Dashboard(host, found.dashboard_ports, found.dashboard_prefix)]
        return _running[0]
