"""Which rows make the model's next batch, and whether it is worth waiting for more. Pure.

Runs in: feeder

Tasks send pieces: rows of one partition, in order. A batch takes rows of the oldest pieces, of
whichever tasks, until it is full. One that is not full goes as soon as nobody can add to it, or
after a short time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sparkdl.core.errors import ProtocolError
from sparkdl.feed.store.session import Session

MAX_PIECES = 2
"""Of one task that are not answered: one that is scored, one that waits. Bounds the memory."""
LATENCY_S = 0.005
"""For which a batch that is not full waits for more, while the model has nothing else to do."""


@dataclass(frozen=True)
class Piece:
    """Rows of one task.

    Attributes:
        number: counts the task's pieces.
        group: only pieces of one group share a batch.
        values: the model's inputs, by name.
        answers: the outputs' columns of the parts that are answered.
    """

    task: int
    number: int
    rows: int
    batch_size: int
    group: Hashable = None
    values: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    answers: list[Any] = field(default_factory=list, compare=False, repr=False)


@dataclass(frozen=True)
class Part:
    """Rows `start` to before `stop` of a piece."""

    piece: Piece
    start: int
    stop: int

    @property
    def rows(self) -> int:
        """How many."""
        return self.stop - self.start

    @property
    def values(self) -> dict[str, Any]:
        """The model's inputs, by name."""
        return {name: each[self.start : self.stop] for name, each in self.piece.values.items()}


def shares(parts: Sequence[Part]) -> Iterator[tuple[Part, ...]]:
    """Yield a batch's shares of tasks, or its pieces if there is one task; none of one piece."""
    tasks = {part.piece.task for part in parts}
    found: dict[int, list[Part]] = {}
    for place, part in enumerate(parts):
        found.setdefault(place if len(tasks) == 1 else part.piece.task, []).append(part)
    yield from map(tuple, found.values() if len(parts) > 1 else ())


@dataclass
class _Waiting:
    piece: Piece
    since_s: float
    taken: int = 0


@dataclass
class Batcher:
    """The queue of pieces. All times are in seconds of one clock, which the caller reads."""

    latency_s: float = LATENCY_S
    _tasks: dict[int, Session] = field(default_factory=dict)
    """What each task has sent and got, in pieces."""
    _queue: deque[_Waiting] = field(default_factory=deque)

    @property
    def tasks(self) -> int:
        """How many tasks there are."""
        return len(self._tasks)

    def join(self, task: int) -> Session:
        """Expect pieces of a task; return how many it has sent and got."""
        self._tasks[task] = Session()
        return self._tasks[task]

    def leave(self, task: int) -> None:
        """Forget a task, and its pieces that are not under way."""
        self._tasks.pop(task, None)
        self._queue = deque(each for each in self._queue if each.piece.task != task)

    def end(self, task: int) -> None:
        """Expect no more pieces of a task; it still wants answers."""
        if task in self._tasks:
            self._tasks[task].is_through = True

    def add(self, piece: Piece, now_s: float) -> None:
        """Take a piece, of one row at least.

        Raises:
            ProtocolError: if the task is unknown, or has more unanswered ones than it may.
        """
        task = self._tasks.get(piece.task)
        if task is None or not task.may_send(MAX_PIECES) or piece.rows < 1:
            raise ProtocolError(f"a task sent a piece that it may not send: {piece}")
        task.send(1)
        self._queue.append(_Waiting(piece, now_s))

    def answer(self, piece: Piece) -> None:
        """A piece has been answered: its task may send another."""
        if piece.task in self._tasks:
            self._tasks[piece.task].answer(1)

    def wait_s(self, now_s: float) -> float | None:
        """Return for how long there is no batch if no piece comes: 0 if there is one now.

        None: without pieces there is none.
        """
        if not self._queue:
            return None
        first = self._queue[0]
        rows = 0
        for each in self._queue:
            if each.piece.group != first.piece.group:
                return 0.0  # what comes is behind that
            rows += each.piece.rows - each.taken
            if rows >= first.piece.batch_size:
                return 0.0
        if not any(task.may_send(MAX_PIECES) for task in self._tasks.values()):
            return 0.0
        return max(0.0, first.since_s + self.latency_s - now_s)

    def take(self, now_s: float) -> tuple[Part, ...]:
        """Return the next batch, in the order of the queue; empty if it is not time yet."""
        if self.wait_s(now_s) != 0.0:
            return ()
        first = self._queue[0].piece
        parts: list[Part] = []
        room = first.batch_size
        while room and self._queue and self._queue[0].piece.group == first.group:
            head = self._queue[0]
            stop = min(head.piece.rows, head.taken + room)
            parts.append(Part(head.piece, head.taken, stop))
            room -= stop - head.taken
            head.taken = stop
            if stop == head.piece.rows:
                self._queue.popleft()
        return tuple(parts)
