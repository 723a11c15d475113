"""Performs the actions of the feeds' state machine: messages, Spark jobs, answers to calls.

Methods of `FeedRunner` that begin with an underscore run on the controller's event loop, where all
events come one after the other: so the feeds need no lock, and no step sees half of another's
change. Blocking work does not run there: Spark jobs run in threads of the waiting calls
(`JobThread`). Only `_states`, `_answers` and `_announced`, which callers wait for, are written
under the controller's condition.
"""

from __future__ import annotations

import asyncio
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

from sparkdl.control.lease import driver_keep_alive
from sparkdl.control.messages import FeedEnd, Spooled
from sparkdl.core.deadline import Deadline
from sparkdl.core.errors import (
    ConfigError,
    FeedClosedError,
    FeedTimeoutError,
    FeedTypeError,
    SparkdlError,
)
from sparkdl.core.failure import Code
from sparkdl.driver.controller import Controller
from sparkdl.driver.events import Stepped
from sparkdl.driver.executors.executor import Executor
from sparkdl.driver.feeds import state as fs
from sparkdl.driver.feeds.coverage import CoverageStore, FeedRequest
from sparkdl.driver.feeds.report import FeedReport, stalled_waits
from sparkdl.driver.feeds.transitions import REASON_S, step
from sparkdl.driver.lifecycle.state import (
    Finished,
    Running,
    before_stop,
    failure_of,
    feed_problem_of,
    generation_of,
    has_ended,
    left_of,
)
from sparkdl.driver.threads import Thread, begin
from sparkdl.driver.view import ClusterView
from sparkdl.feed.transfer.messages import SHUT_DOWN, FedPartition, FeedSpec

_log = logging.getLogger(__name__)

ALL_FEEDS = ""
"""In place of a feed's name: all feeds, including ones not used yet."""
STALL_S = 10.0
"""How long nodes may wait for an unfed feed before a warning is logged."""
_CANCEL_S = 1.0
"""Cancel again this often: a job that was just being submitted misses the first time."""
_REST_S = 0.005
"""Between two looks at the nodes: reports that come meanwhile are looked at together."""
_MEANWHILE_S = 0.25
"""How often a waiting call updates its progress bar and looks for the end of the cluster."""


class JobThread:
    """A thread that runs Spark jobs one after the other, with the local properties of its maker.

    Why not the caller's own thread? Ctrl-C within py4j closes the connections of all threads, and
    the nodes' job would be submitted again.
    """

    def __init__(self, name: str, thread: Thread) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread = thread(self._run, name)
        self._thread.start()

    def submit(self, job: Callable[[], object]) -> None:
        self._jobs.put(job)

    def close(self, wait_s: float = 0.0) -> None:
        self._jobs.put(None)
        self._thread.join(wait_s)

    def _run(self) -> None:
        while job := self._jobs.get():
            try:
                job()
            except Exception:  # noqa: BLE001 (of Spark, which may be gone; the next job is run)
                _log.warning(
                    "A Spark job of a feed raised an unexpected error. If the feed does not "
                    "continue, shut the cluster down and launch it again",
                    exc_info=True,
                )


class FeedJob:
    """A Spark job of a feed. It begins once the one before has ended: it needs the same slots."""

    def __init__(self, executor: Executor, feed: str, before: FeedJob | None) -> None:
        self._executor, self._feed, self._before = executor, feed, before
        self._over = threading.Event()
        self._changed = threading.Condition()
        self._is_cancelled = self._is_running = False

    def run(self, start: fs.StartJob) -> tuple[FedPartition, ...]:
        try:
            while not (self._is_cancelled or self._is_first(_CANCEL_S)):
                pass  # the call's timeout cancels this job, whatever holds up the one before
            with self._changed:
                if self._is_cancelled:
                    raise FeedClosedError(f"feed {self._feed!r} was cancelled")
                self._is_running = True
            return tuple(self._executor.feed(start.data, start.spec))
        finally:
            with self._changed:
                self._is_running = False
                self._changed.notify_all()
            self._over.set()

    def cancel(self) -> None:
        """Cancel it until it has ended: Spark may not know it yet. The lock spares the next job."""
        with self._changed:
            self._is_cancelled = True
            while self._is_running:
                with suppress(Exception):  # of Spark, which may be gone
                    self._executor.cancel_feeds(self._feed)
                self._changed.wait(_CANCEL_S)

    def _is_first(self, wait_s: float) -> bool:
        """Whether all jobs before have ended; one that was cancelled did not wait for its own."""
        before = self._before
        if before is not None and before._is_first(wait_s) and before._over.wait(wait_s):
            self._before = None
        return self._before is None


class StallWarning:
    """Warns once if nodes have waited for `STALL_S` for rows that the driver has not fed."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self._found, self._due = "", Deadline.after(STALL_S)

    def look(self) -> None:
        """Look again. The warning is logged on the loop, which no interrupt reaches."""
        found = self._controller.look(self._find)
        if found != self._found:
            self._found, self._due = found, Deadline.after(STALL_S)
        elif found and self._due.has_passed:
            warning = ("Cluster %s: %s", self._controller.spec.cluster_id, found)
            self._controller.soon(_log.warning, *warning)
            self._due = Deadline.after(None)

    def _find(self, view: ClusterView) -> str:
        # After a restart nodes may wait for more rows of an earlier call.
        is_first = not generation_of(view.state)
        return stalled_waits(self._controller.spec, view.feeds) if is_first else ""


class FeedRunner:
    """The feeds of a cluster, each in its state. Public methods may be called from any thread."""

    def __init__(
        self, controller: Controller, executor: Executor, coverage: CoverageStore, spec: FeedSpec
    ) -> None:
        self._controller = controller
        self._executor = executor
        self._coverage = coverage
        self._spec = spec
        settings = controller.spec.settings
        keep = driver_keep_alive(settings.lease_s, settings.recovery.host_timeout_s)
        self._answer_s = keep.longest_s + REASON_S
        self._states: dict[str, fs.State] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._tickets = count()
        self._answers: dict[int, Any] = {}
        self._job_threads: dict[int, JobThread] = {}
        self._jobs: dict[str, FeedJob] = {}
        """The last job of each feed."""
        self._starter = JobThread(f"sparkdl-feeds-{controller.spec.cluster_id}", executor.thread)
        self._ended: dict[str, int] = {}
        """By feed, the generation in which the user asked for its end."""
        self._announced: set[tuple[str, int]] = set()
        self._problem: Exception | None = None
        self._is_looking, self._rests_until_s = False, -math.inf
        # Last of all, because the loop may call it at once.
        controller.events.subscribe(self._look_soon, Stepped)

    # from any thread

    def ask(
        self, feed: str, request: FeedRequest, job_thread: JobThread, on_poll: Callable[[], bool]
    ) -> FeedReport:
        """Queue a request, whose jobs `job_thread` runs; call `on_poll` until an answer comes.

        Once it returns false, the request is withdrawn.
        """
        ticket = next(self._tickets)
        # Before the request: the loop may start the job as soon as it has that.
        self._job_threads[ticket] = job_thread
        self._controller.soon(self._handle, feed, fs.Requested(fs.QueuedCall(ticket, request)))
        while not self._controller.wait_for(
            lambda view: ticket in self._answers, Deadline.after(_MEANWHILE_S)
        ):
            # A closed loop answers no more, so the wait looks up now and then.
            if self._controller.is_closed:
                raise FeedClosedError("the cluster has been shut down")
            if not on_poll():
                self._controller.soon(self._handle, feed, fs.Withdrawn(ticket))
        answer = self._answers.pop(ticket)
        if isinstance(answer, Exception):
            raise answer
        report: FeedReport = answer
        return report

    def rows_to_read(self, feed: str) -> int:
        """Return the number of rows of the current call; 0 if unknown."""
        state = self._states.get(feed)
        if state is None or isinstance(state, fs.Idle) or not state.run.rows:
            return 0
        return state.run.covered + state.run.rows

    def rows_read(self, feed: str) -> int | None:
        """Return the number of rows read of the current call.

        Covered rows count, and rows that a restart repeats count once. `None` while nothing is fed,
        between two generations for example.
        """
        state = self._states.get(feed)
        if state is None or isinstance(state, fs.Idle):
            return None
        run, counts = state.run, state.feed.nodes.counts_of(state.run.node_ids)
        since = (count.given.rows - run.start_counts[n].given.rows for n, count in counts.items())
        return run.covered + sum(max(0, rows) for rows in since)

    def end(self, feed: str, timeout_s: float | None) -> None:
        """Announce a feed's end, to later generations too, once rows fed again have been read."""
        self._controller.soon(self._end, feed)
        self._controller.wait_for(
            lambda view: has_ended(view.state) or self._is_announced(view, feed),
            Deadline.after(timeout_s),
        )

    def raise_problem(self) -> None:
        """Raise the error of feeding rows again in the background, once."""
        problem, self._problem = self._problem, None
        if problem is not None:
            raise problem

    def close(self) -> None:
        self._starter.close()

    # on the controller's loop

    def _look_soon(self, _: Stepped) -> None:
        """Look at once, but not for each message: many nodes report progress all the time."""
        if not self._is_looking:
            self._is_looking = True
            wait_s = max(0.0, self._rests_until_s - time.monotonic())
            self._controller.later(wait_s, self._look)

    def _look(self) -> None:
        self._is_looking = False
        # All reports that have come, in one event for each feed: a look at all nodes serves many.
        spooled: dict[str, list[tuple[int, Spooled]]] = {}
        while self._controller.view.spooled:
            node_id, report = self._controller.view.spooled.popleft()
            spooled.setdefault(report.feed, []).append((node_id, report))
        for feed, reports in spooled.items():
            self._handle(feed, fs.RowsSpooled(tuple(reports)))
        for feed, state in [*self._states.items()]:
            nodes = nodes_now(self._controller.view, feed)
            if nodes != state.feed.nodes:
                self._handle(feed, fs.NodesSeen(nodes))
        self._announce_ends()
        self._rests_until_s = time.monotonic() + _REST_S

    def _handle(self, name: str, event: fs.Event) -> None:
        before = self._states.get(name)
        if before is None:
            spec, nodes = replace(self._spec, feed=name), nodes_now(self._controller.view, name)
            before = fs.Idle(fs.Feed(self._coverage.history(name), spec, self._answer_s, nodes))
        state, actions = step(before, event, time.monotonic())
        # Most looks change nothing, so threads that wait are not woken for them.
        if state is not before:
            with self._controller.changed:
                self._states[name] = state
                self._controller.changed.notify_all()
        for action in actions:
            self._perform(name, action)
        self._arm(name, fs.wakes_s(state))
        if isinstance(state, fs.Idle):
            self._announce_ends()

    def _perform(self, name: str, action: fs.Action) -> None:
        match action:
            case fs.Send(message, node_ids, generation):
                self._controller.broadcast(message, set(node_ids), generation)
            case fs.StartJob():
                self._start(name, action)
            case fs.CancelJob():
                # Not on the loop: py4j blocks until the JVM answers.
                cancel = self._jobs[name].cancel
                threading.Thread(target=cancel, name="sparkdl-cancel", daemon=True).start()
            case fs.Answer():
                self._answer(action)
            case fs.KeepProblem(error):
                _log.error("Feed %r could not be replayed: %s", name, error)
                self._problem = self._problem or error
            case fs.Warn(text):
                _log.warning("%s", text)

    def _start(self, name: str, action: fs.StartJob) -> None:
        self._jobs[name] = FeedJob(self._executor, name, self._jobs.get(name))
        job = partial(self._run_job, name, self._jobs[name], action)
        job_thread = self._job_threads.get(-1 if action.ticket is None else action.ticket)
        if job_thread is not None:
            job_thread.submit(job)
        else:
            # Rows that are fed again after a restart: no call waits. A thread for each feed, since
            # the nodes may need rows of several at once. `_starter` makes them: threads inherit
            # Spark's local properties from their maker, and the controller's thread has none.
            spawn = partial(begin, job, f"sparkdl-renewal-{name}", self._executor.thread)
            self._starter.submit(spawn)

    def _answer(self, answer: fs.Answer) -> None:
        self._job_threads.pop(answer.ticket, None)
        with self._controller.changed:
            value = answer.value
            if isinstance(value, FeedTimeoutError):
                unfed = stalled_waits(self._controller.spec, self._controller.view.feeds)
                value = FeedTimeoutError(f"{value.args[0]}. {unfed}") if unfed else value
            self._answers[answer.ticket] = value
            self._controller.changed.notify_all()

    def _arm(self, name: str, deadline_s: float) -> None:
        if timer := self._timers.pop(name, None):
            timer.cancel()
        if not math.isinf(deadline_s):
            wait_s = max(0.0, deadline_s - time.monotonic())
            self._timers[name] = self._controller.later(
                wait_s, self._handle, name, fs.DeadlinePassed()
            )

    def _end(self, feed: str) -> None:
        self._ended[feed] = generation_of(self._controller.view.state) or 0
        self._look()

    def _announce_ends(self) -> None:
        view = self._controller.view
        if not isinstance(view.state, Running):
            return
        generation = view.state.world.generation
        for feed, asked_in in self._ended.items():
            key = (feed, generation)
            if key in self._announced or not self._is_settled(*key, asked_in == generation):
                continue
            everyone = {node.node_id for node in self._controller.spec.nodes}  # unfed ones may wait
            self._controller.broadcast(FeedEnd((feed,) if feed else ()), everyone, generation)
            with self._controller.changed:
                self._announced.add(key)
                self._controller.changed.notify_all()

    def _is_settled(self, feed: str, generation: int, is_asked_now: bool) -> bool:
        """Whether a generation has received all its rows.

        Calls that wait do not delay an end that the user asked for while this generation ran.
        """
        if feed == ALL_FEEDS:
            return all(self._is_settled(name, generation, is_asked_now) for name in self._states)
        state = self._states.get(feed)
        if state is None or (is_asked_now and state.feed.requests):
            return True
        return isinstance(state, fs.Idle) and state.generation == generation

    def _is_announced(self, view: ClusterView, feed: str) -> bool:
        state = view.state
        return isinstance(state, Running) and (feed, state.world.generation) in self._announced

    # in threads of their own

    def _run_job(self, name: str, job: FeedJob, start: fs.StartJob) -> None:
        event: fs.Event
        try:
            event = fs.JobEnded(start.job, job.run(start))
        except Exception as error:  # noqa: BLE001 (raised in the call that waits for the job)
            reason_s = REASON_S
            if isinstance(error, (ConfigError, FeedTypeError)):
                reason_s = 0.0  # the data are the reason, not a node
            # Only a restart makes up for the longer wait: without one the call fails in any case.
            elif Code.FEED_LOST.is_in(error) and self._controller.spec.settings.can_restart:
                reason_s = self._answer_s
            event = fs.JobFailed(start.job, error, reason_s)
        self._controller.soon(self._handle, name, event)


def failure_behind(controller: Controller, error: SparkdlError) -> SparkdlError:
    """Return the failure of nodes behind a failed inference, or the error itself.

    It waits a moment for the failure to be known: the feeder may have noticed it before the driver.
    """
    # A wrong answer is the program's own error: no failure of a node will explain it.
    if not Code.WRONG_ANSWER.is_in(error):
        controller.wait_for(lambda view: has_ended(view.state), Deadline.after(REASON_S))
    failure, state = controller.look(lambda view: (failure_of(view.state), view.state))
    if failure is None and before_stop(state) is not state:
        return FeedClosedError(SHUT_DOWN)
    return failure or error


def nodes_now(view: ClusterView, feed: str) -> fs.Nodes:
    state = view.state
    counts: Mapping[int, Any] = {
        node_id: reported for (node_id, name), reported in view.feeds.items() if name == feed
    }
    return fs.Nodes(
        generation=generation_of(state),
        world=state.world if isinstance(state, (Running, Finished)) else None,
        problem=feed_problem_of(state),
        has_failed=failure_of(state) is not None,
        has_finished=isinstance(state, Finished),
        finished=frozenset(getattr(state, "returned", {})) | left_of(state),
        counts=counts,
        progress=view.progress,
    )
