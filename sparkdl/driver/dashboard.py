"""Tells the dashboard, and a file, what the clusters of this program do.

Runs in: driver

One process serves the pages of all clusters of a program, from the first launch to the program's
end. A thread here writes to it once a second what has changed. If either of them breaks or stands
still, the clusters do not notice: nothing waits for them.
"""

from __future__ import annotations

import atexit
import logging
import math
import secrets
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import astuple, dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import IO

from sparkdl.control.messages import FeedCount, NodeActive, NodeLoad
from sparkdl.core.deadline import Deadline
from sparkdl.core.errors import ConfigError, FrameworkMissingError
from sparkdl.core.failure import Failure
from sparkdl.core.settings import Environment
from sparkdl.core.spec import ClusterSpec
from sparkdl.core.world import CheckpointRef, World, host_port
from sparkdl.dashboard.events import (
    SUFFIX,
    AnyEvent,
    AskLog,
    Changed,
    Checkpoint,
    EpochsFed,
    FeedColumns,
    Launched,
    Place,
    Printed,
    Problem,
    Sampled,
    Stacks,
    ask_of,
    line_of,
)
from sparkdl.driver.controller import Call, Controller, View
from sparkdl.driver.lifecycle import state as states
from sparkdl.driver.show import node_state
from sparkdl.driver.waits import Shares, in_step

_log = logging.getLogger(__name__)

_PERIOD_S = 1.0
_NODES_PER_S = 2000
"""Of more nodes, samples are taken more seldom."""
_KEPT = 3600
"""Samples in a record of the first hour; of each later time as many, so that files stay small."""
_ANSWER_S = 5.0
_END_S = 5.0
_MAX_NEWS = 100_000
"""Events that wait while nothing can be written; the oldest are dropped."""


class Recorder(threading.Thread):
    """Tells what becomes of one cluster, until it has ended.

    Args:
        folder: where a file of it is written, if it is to be.
        dashboard: where it is shown, if it is to be.

    Raises:
        OSError: if the file cannot be made.
    """

    def __init__(
        self, controller: Controller, folder: str | None, dashboard: Dashboard | None
    ) -> None:
        spec = controller.spec
        super().__init__(name=f"sparkdl-recorder-{spec.cluster_id}", daemon=True)
        self._controller = controller
        self._file: IO[bytes] | None = None
        if folder is not None:
            self._file = Path(folder, f"{spec.cluster_id}{SUFFIX}").open("xb")  # noqa: SIM115 (`_close`)
        self._dashboard = dashboard
        self._born_s = self._kept_s = controller.wall_s()
        self._seen = Seen(spec.cluster_id)
        names = tuple(node.name for node in spec.nodes)
        mode = spec.input_mode.name.lower()
        launched = Launched(spec.cluster_id, self._born_s, spec.framework, names, mode)
        self._news: deque[AnyEvent] = deque([launched], maxlen=_MAX_NEWS)
        self._note(controller.view.state)  # it has not been started yet
        controller.follow(self._note)

    def run(self) -> None:
        """Tell what is new once a second, or more seldom of thousands of nodes."""
        spec = self._controller.spec
        period_s = max(_PERIOD_S, len(spec.nodes) / _NODES_PER_S)
        if self._dashboard:
            self._dashboard.add(self._controller)
        try:
            has_ended = False
            while not has_ended:
                has_ended = self._controller.is_closed or self._controller.wait_for(
                    lambda view: states.is_empty(view.state), Deadline.after(period_s)
                )
                now_s = self._controller.wall_s()
                self._news.extend(self._controller.look(partial(fed, spec.cluster_id, now_s)))
                self._news.append(self._controller.look(partial(sampled, spec, now_s)))
                self._tell(has_ended)
        except Exception:  # noqa: BLE001 (whatever it is, the training does not need this)
            _log.exception("Cluster %s is not recorded any more, and goes on", spec.cluster_id)
        finally:
            if self._dashboard:
                self._dashboard.remove(self._controller)
            self._close()

    def _note(self, state: states.State) -> None:
        """Note a state, on the controller's thread."""
        self._news.extend(self._seen.news(state, self._controller.wall_s()))

    def _tell(self, is_last: bool) -> None:
        lines = []
        while self._news:
            event = self._news.popleft()
            lines.append(line_of(event))
            self._keep(event, lines[-1], is_last)
        if self._dashboard:
            self._dashboard.write(b"".join(lines))

    def _keep(self, event: AnyEvent, line: bytes, is_last: bool) -> None:
        """Write to the file; of samples the fewer the longer it trains."""
        if self._file is None:
            return
        if isinstance(event, Sampled):
            rest_s = (event.time_s - self._born_s) / _KEPT
            if event.time_s - self._kept_s < rest_s and not is_last:
                return
            self._kept_s = event.time_s
        try:
            self._file.write(line)
            self._file.flush()
        except OSError as error:
            _log.warning("The record of cluster %s ends here: %s", event.cluster, error)
            self._close()

    def _close(self) -> None:
        if self._file is not None:
            with suppress(OSError):
                self._file.close()
            self._file = None


@dataclass
class Seen:
    """What has been told of a cluster's states."""

    cluster: str
    state: str = ""
    generation: int = -1
    failures: tuple[Failure, ...] = ()
    checkpoint: CheckpointRef | None = None

    def news(self, state: states.State, now_s: float) -> Iterator[AnyEvent]:
        """Yield what is new in a state."""
        name, before = type(state).__name__.lower(), states.before_stop(state)
        generation = states.generation_of(state)
        generation = self.generation if generation is None else generation
        failures = tuple(getattr(before, "failures", ()))
        if (name, generation, failures) != (self.state, self.generation, self.failures):
            begins = name == "running" and (self.state, self.generation) != (name, generation)
            world = getattr(before, "world", None)
            cause = getattr(getattr(before, "roster", None), "history", None)
            problem = getattr(before, "problem", None)
            problems = tuple(map(_problem, sorted(failures, key=lambda failure: failure.order)))
            if problem is not None and not problems:
                problems = (Problem("", f"{type(problem).__name__}: {problem}"),)
            yield Changed(
                self.cluster,
                now_s,
                name,
                generation,
                _places(world) if begins else (),
                problems,
                cause.cause.headline() if begins and cause and cause.cause else "",
            )
            self.state, self.generation, self.failures = name, generation, failures
        checkpoint = getattr(getattr(before, "roster", None), "checkpoint", None)
        if checkpoint is not None and checkpoint != self.checkpoint:
            self.checkpoint = checkpoint
            yield Checkpoint(self.cluster, now_s, checkpoint.url, checkpoint.step)


def _problem(failure: Failure) -> Problem:
    return Problem(failure.node, failure.headline(), failure.describe())


def _places(world: World | None) -> tuple[Place, ...]:
    members = world.members if world else ()
    return tuple(Place(member.node.node_id, member.rank, member.host) for member in members)


def fed(cluster: str, now_s: float, view: View) -> list[AnyEvent]:
    """Return which epochs have come to the nodes since the last call; while the view is held."""
    events: list[AnyEvent] = []
    while view.epochs:
        feed, epochs = view.epochs.popleft()
        events.append(EpochsFed(cluster, now_s, feed, *astuple(epochs)))
    return events


def sampled(spec: ClusterSpec, now_s: float, view: View) -> Sampled:
    """Return how far the nodes are; while the view is held."""
    node_ids = range(len(spec.nodes))
    generation = states.generation_of(view.state)
    reported = [view.activity.get(node_id) or _NOTHING for node_id in node_ids]
    # What a node reported before a restart says nothing of where it is now.
    active = [each if generation in (None, each.generation) else _NOTHING for each in reported]
    names = sorted({name for each in active for name in each.metrics})
    feeds = sorted({feed for _, feed in view.feeds})
    return Sampled(
        spec.cluster_id,
        now_s,
        [node_state(view, node_id) for node_id in node_ids],
        [view.pids.get(node_id, 0) for node_id in node_ids],
        [each.step for each in active],
        {name: [each.numbers.get(name) for each in active] for name in names},
        {
            feed: _columns(
                feed, [view.feeds.get((n, feed)) for n in node_ids], view.calls.get(feed)
            )
            for feed in feeds
        },
        _loads([view.load.get(node_id) or _IDLE for node_id in node_ids]) if view.load else {},
        _waits(view, node_ids),
    )


_NOTHING, _IDLE = NodeActive(0), NodeLoad(0.0, 0)
_UNKNOWN = Shares(math.nan, math.nan, math.nan)


def _loads(loads: list[NodeLoad]) -> dict[str, list[float]]:
    columns = {name: [getattr(load, name) for load in loads] for name in NodeLoad.__struct_fields__}
    always = ("cores", "memory_nbytes")
    return {name: column for name, column in columns.items() if name in always or any(column)}


def _waits(view: View, node_ids: Iterable[int]) -> dict[str, list[float | None]]:
    shares = view.waits.shares(in_step(view.state))
    found = [shares.get(node_id, _UNKNOWN) for node_id in node_ids] if shares else []
    columns = {name: [getattr(each, name) for each in found] for name in ("rows", "others", "lag")}
    return {
        name: [None if math.isnan(share) else share for share in column]
        for name, column in columns.items()
        if column
    }


def _columns(feed: str, counts: list[FeedCount | None], call: Call | None) -> FeedColumns:
    found = [count or FeedCount(feed) for count in counts]
    stage, goal = "", 0
    if call is not None:
        stage = call.stage(dict(enumerate(found)))
        goal = call.rows and call.rows + sum(map(_used, call.before.values()))
    return FeedColumns(
        [count.rows_received for count in found],
        [_used(count) for count in found],
        [count.steps for count in found],
        [count.epochs_done for count in found],
        goal,
        stage,
    )


def _used(count: FeedCount) -> int:
    return count.rows_consumed + count.rows_dropped


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
        with _listener(host, ports) as listener:
            port, fd = listener.getsockname()[1], listener.fileno()
            self._process = subprocess.Popen(
                [sys.executable, "-m", "sparkdl.dashboard.server", str(fd), prefix],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=[fd],
                start_new_session=True,  # Ctrl-C in a notebook or a terminal is not meant for it
            )
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
        """Answer what the pages ask of a cluster."""
        self._controllers[controller.spec.cluster_id] = controller

    def remove(self, controller: Controller) -> None:
        """Answer no more: the cluster has ended."""
        self._controllers.pop(controller.spec.cluster_id, None)

    def write(self, lines: bytes) -> None:
        """Tell it what has happened; waits while it does not read."""
        assert self._process.stdin
        with self._lock:
            try:
                self._process.stdin.write(lines)
                self._process.stdin.flush()
            except (OSError, ValueError):
                if not self._is_closed:
                    self._is_closed = True
                    _log.warning("The dashboard has ended; clusters go on without it")

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
            lines = controller.fetch_logs(asked.node_id, asked.lines, deadline)
            answer = Printed(asked.cluster, controller.wall_s(), asked.node_id, lines)
        else:
            answer = Stacks(asked.cluster, controller.wall_s(), controller.fetch_stacks(deadline))
        self.write(line_of(answer))


def is_available() -> bool:
    """Whether what serves the pages is installed."""
    return find_spec("bokeh") is not None


def dashboard_of_program(wanted: bool | None, host: str) -> Dashboard | None:
    """Return the dashboard of this program, started if there is none yet.

    Args:
        wanted: None for one if it is installed, unless SPARKDL_DASHBOARD=0 says otherwise.
        host: the address that it listens at.

    Raises:
        FrameworkMissingError: if it is asked for and not installed.
        ConfigError: if it is asked for, and an environment variable makes no sense.
        OSError: if it is asked for, and nothing can listen at `host`.
    """
    if wanted is None and not (Environment.read().dashboard and is_available()):
        return None
    if wanted is False:
        return None
    if not is_available():
        raise FrameworkMissingError("dashboard=True: bokeh is not installed: pip install bokeh")
    try:
        return _program.dashboard(host)
    except (OSError, ConfigError) as error:
        if wanted:
            raise
        _log.warning("There is no dashboard: %s", error)
        return None


def end_dashboard() -> None:
    """End the dashboard of this program, if there is one; the next launch starts another."""
    _program.end()


class _Program:
    """The one dashboard of this program."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._dashboard: Dashboard | None = None

    def dashboard(self, host: str) -> Dashboard:
        with self._lock:
            if self._dashboard is None or not self._dashboard.is_there:
                environment = Environment.read()
                self._dashboard = Dashboard(
                    environment.dashboard_host or host,
                    environment.dashboard_ports,
                    environment.dashboard_prefix,
                )
            return self._dashboard

    def end(self) -> None:
        with self._lock:
            if self._dashboard is not None:
                self._dashboard.close()
            self._dashboard = None


_program = _Program()


def _listener(host: str, ports: tuple[int, ...]) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for port in ports:
        with suppress(OSError):
            return socket.create_server((host, port), family=family)
    if len(ports) == 1:
        raise ConfigError(
            f"SPARKDL_DASHBOARD_PORT={ports[0]}: nothing can listen there at {host}. Set another "
            "port, or a range"
        )
    return socket.create_server((host, 0), family=family)
