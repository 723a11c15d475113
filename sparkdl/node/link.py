"""The child's end of the pipe to its agent: feeds come in, progress and results go out."""

from __future__ import annotations

import logging
import math
import operator
import os
import queue
import select
import signal
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, TypeVar

from sparkdl.control.channel import (
    Local,
    Reported,
    Start,
    Unframer,
    receive,
    send,
)
from sparkdl.control.descriptors import OUT_OF_DESCRIPTORS, close_fd
from sparkdl.control.lease import SILENT_LOOKS, look_s
from sparkdl.control.messages import (
    AllGathered,
    CheckpointCommit,
    Drain,
    Gather,
)
from sparkdl.control.values import decode_value, encode_value
from sparkdl.core.deadline import Deadline
from sparkdl.core.errors import (
    ConfigError,
    CoordinationError,
    FeedClosedError,
    ResultError,
    SparkdlError,
)
from sparkdl.feed.reader.reader import UNWATCHED, TrainingWatch
from sparkdl.frameworks.lone_training import LoneTraining
from sparkdl.node.draining import DrainNotice
from sparkdl.node.readers import FeedReaders

_log = logging.getLogger(__name__)
T = TypeVar("T")

_ANSWERS = (CheckpointCommit, AllGathered)
"""The messages that this process waits for."""


class AgentLink:
    """One thread receives and hands on; any thread may send.

    Attributes:
        feeds: the readers of the node's feeds.
        draining: whether a checkpoint is wanted, because an executor ends.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._send_lock = threading.Lock()  # the frames of two threads must not mix
        self._starts: queue.Queue[tuple[Start, int] | None] = queue.Queue()
        self._answers: dict[type, queue.Queue[Any]] = {kind: queue.Queue() for kind in _ANSWERS}
        self._gathers = threading.Lock()
        self._num_gathered = 0
        self.feeds = FeedReaders(self.send)
        self.draining = DrainNotice(self.send)
        self._is_closing = False
        self._look_s: float | None = None
        self._thread = threading.Thread(target=self._receive, name="sparkdl-link", daemon=True)
        self._thread.start()

    def wait_start(
        self,
        deadline: Deadline,
        when_idle: Callable[[], None] = lambda: None,
        idle_s: float = 2.0,
    ) -> tuple[Start, socket.socket]:
        """Wait for the world; return it, and the socket that holds this node's port.

        Args:
            when_idle: called once if it has not come after `idle_s`: a child imports the modules
                it needs later while other nodes are slower.

        Raises:
            FeedClosedError: if the agent went away or nothing came in time.
            ConfigError: if this process may not have so many descriptors.
        """
        start = None
        with suppress(queue.Empty):
            try:
                # Not at once: if the world is about to begin, these imports would delay it.
                start = self._starts.get(timeout=min(idle_s, deadline.remaining_s))
            except queue.Empty:
                when_idle()
                start = self._starts.get(timeout=deadline.wait_s)
        if start is None:
            raise FeedClosedError("the agent of this node went away before the world began")
        message, fd = start
        if fd < 0:
            raise ConfigError(f"this node cannot have its port: {OUT_OF_DESCRIPTORS}")
        return message, socket.socket(fileno=fd)

    def wait_commit(self, step: int, deadline: Deadline) -> CheckpointCommit | None:
        """Wait for news of the checkpoint of `step`; `None` if there were none in time."""
        return self._wait(CheckpointCommit, lambda news: news.step == step, deadline)

    def all_gather(self, value: Any, timeout_s: float, node: str, generation: int) -> list[Any]:
        """Return the values that all nodes gave to this call, see `NodeContext.all_gather`."""
        try:
            data = encode_value(value)
        except ResultError as error:
            raise ConfigError(f"ctx.all_gather cannot send this value: {error}") from None
        # One at a time: the driver puts values together by their number, which is the call's.
        with self._gathers:
            number, self._num_gathered = self._num_gathered, self._num_gathered + 1
            self.send(Gather(generation, number, data))
            deadline = Deadline.after(timeout_s)
            end = self._wait(AllGathered, lambda end: end.number == number, deadline)
        if end is None:
            raise CoordinationError(
                f"not all nodes called ctx.all_gather or ctx.barrier within {timeout_s:g} s; this "
                f"was call {number + 1} of {node}. cluster.stacks() shows what the nodes are doing"
            )
        if end.problem:
            raise CoordinationError(
                f"call {number + 1} of ctx.all_gather or ctx.barrier has no end: {end.problem}"
            )
        return [decode_value(part) for part in end.values]

    def send(self, message: Local, fd: int = -1) -> None:
        """Send a message; the caller keeps `fd`."""
        try:
            with self._send_lock:
                send(self._sock, message, fd)
        except OSError as error:
            raise FeedClosedError(f"the agent of this node is gone: {error}") from None

    def close(self) -> None:
        """End the link in order; the agent sees the end of the stream."""
        # Before the shutdown: otherwise the thread takes the end of the stream for a lost agent.
        self._is_closing = True
        self._sock.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._sock.close()
        while start := self._starts.get():  # the last one is None
            close_fd(start[1])
        # The loop has taken the end of the queue, which a later wait has to find, too.
        self._starts.put(None)

    def _receive(self) -> None:
        unframer = Unframer()
        try:
            while self._hears() and (messages := receive(self._sock, unframer)) is not None:
                for message, fd in messages:
                    self._sort(message, fd)
        except (OSError, SparkdlError) as error:
            _log.debug("The pipe to the agent broke: %s", error)
        unframer.close()
        # For the main thread, if it still waits for the world.
        self._starts.put(None)
        self.feeds.lose()
        if not self._is_closing:
            # Without its agent nothing would end this process, and it must not train on unseen.
            os.kill(os.getpid(), signal.SIGKILL)

    def _hears(self) -> bool:
        """Wait for the agent; false if it has been silent until the driver may give it up."""
        # The lease comes with `Start`. Until then only the end of the pipe shows that the agent is
        # gone.
        if self._look_s is None:
            return True
        ears = select.poll()
        ears.register(self._sock, select.POLLIN)
        return any(ears.poll(self._look_s * 1000) for _ in range(SILENT_LOOKS))

    def _sort(self, message: Local, fd: int) -> None:
        match message:
            case Start():
                self._look_s = look_s(message.spec.settings.lease_s, len(message.spec.nodes))
                # Before the main thread learns of the world: user code asks for readers as soon as
                # it runs.
                self.feeds.begin(message, self._watch_training(message))
                self._starts.put((message, fd))
            case Drain():
                self.draining.hear(message)
            # Negative numbers belong to notices that executors end, see `Drain`.
            case AllGathered() if message.number < 0:
                self.draining.settle(message)
            case CheckpointCommit() | AllGathered():
                self._answers[type(message)].put(message)
            case _:
                self.feeds.take(message, fd)

    def _wait(self, kind: type[T], is_wanted: Callable[[T], bool], deadline: Deadline) -> T | None:
        return wait_for_nodes(self._answers[kind], is_wanted, deadline)

    def _watch_training(self, start: Start) -> TrainingWatch:
        """Return what looks whether this node trains with the others, if it has to."""
        spec, own = start.spec, start.world.member(start.node_id)
        trainers = [each for each in start.world.trainers if not each.role.is_server]
        if spec.independent_models or own not in trainers or len(trainers) == 1:
            return UNWATCHED
        return LoneTraining(spec.framework, len(trainers))


def wait_for_nodes(
    arrived: queue.Queue[T], is_wanted: Callable[[T], bool], deadline: Deadline
) -> T | None:
    """Return the first wanted message; drop earlier ones, whose waits have timed out.

    A thread that stands here waits for the other nodes (`node/waits.py`).
    """
    while True:
        try:
            message = arrived.get(timeout=deadline.wait_s)
        except queue.Empty:
            return None
        if is_wanted(message):
            return message


def reported(step: Any, metrics: Mapping[str, Any]) -> Reported:
    """Return the message for `NodeContext.report`.

    Args:
        step: a whole number; arrays and tensors of one such number are taken as well.
        metrics: likewise, of any number.

    Raises:
        ConfigError: if one of them is something else.
    """
    try:
        number = operator.index(step.item() if hasattr(step, "item") else step)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"report(step={step!r}): must be a whole number ({error})") from None
    if number < 0:
        raise ConfigError(f"report(step={number}): steps are 0 or more")
    values: dict[str, float | str] = {}
    for name, value in metrics.items():
        try:
            found = float(value)
        except (TypeError, ValueError) as error:
            text = f"report({name}={value!r}): must be a number ({error})"
            raise ConfigError(text) from None
        # JSON has no number for infinity and NaN: a loss of NaN would end the node.
        values[name] = found if math.isfinite(found) else str(found)
    return Reported(number, values)
