"""Which rows make a batch, and who waits for whom: pieces of tasks, a clock of the test's own."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkdl.core.errors import ProtocolError
from sparkdl.ml.scoring.batching import LATENCY_S, MAX_PIECES, Batcher, Part, Piece

SIZE = 10
A, B = 1, 2


def batcher(*tasks: int) -> Batcher:
    found = Batcher()
    for task in tasks or (A, B):
        found.join(task)
    return found


def piece(task: int, rows: int, number: int = 0, group: str = "") -> Piece:
    return Piece(task, number, rows, SIZE, group)


def cut(parts: tuple[Part, ...]) -> list[tuple[int, int, int]]:
    return [(part.piece.task, part.start, part.stop) for part in parts]


def test_rows_of_several_tasks_fill_a_batch_and_what_is_left_begins_the_next() -> None:
    queue = batcher()
    queue.add(piece(A, 6), 0.0)
    queue.add(piece(B, 7), 0.0)
    assert queue.wait_s(0.0) == 0.0
    assert cut(queue.take(0.0)) == [(A, 0, 6), (B, 0, 4)]
    queue.add(piece(A, 9, 1), 0.0)
    assert cut(queue.take(0.0)) == [(B, 4, 7), (A, 0, 7)]


def test_large_piece_is_several_batches() -> None:
    queue = batcher(A)
    queue.add(piece(A, 25), 0.0)
    queue.end(A)
    assert [cut(queue.take(0.0)) for _ in range(4)] == [
        [(A, 0, 10)],
        [(A, 10, 20)],
        [(A, 20, 25)],
        [],
    ]


def test_batch_that_is_not_full_waits_for_who_can_add_but_not_for_long() -> None:
    queue = batcher()
    queue.add(piece(A, 3), 100.0)
    assert queue.take(100.0) == ()
    assert queue.wait_s(100.0) == pytest.approx(LATENCY_S)
    assert queue.take(100.0 + LATENCY_S / 2) == ()
    queue.add(piece(B, 3), 100.0 + LATENCY_S / 2)  # which does not begin the wait anew
    assert cut(queue.take(100.0 + LATENCY_S)) == [(A, 0, 3), (B, 0, 3)]
    assert queue.wait_s(101.0) is None


@pytest.mark.parametrize("why", ["the others are through", "they have left", "they may not"])
def test_batch_goes_at_once_when_nobody_can_add(why: str) -> None:
    queue = batcher()
    if why == "they may not":
        for number in range(MAX_PIECES):
            queue.add(piece(A, 1, number), 0.0)
            queue.add(piece(B, 1, number), 0.0)
    else:
        queue.add(piece(A, 1), 0.0)
        queue.end(A)
        assert queue.take(0.0) == ()
        (queue.leave if why == "they have left" else queue.end)(B)
    assert queue.take(0.0) != ()


def test_pieces_of_another_layout_are_not_mixed_in_and_not_waited_for() -> None:
    queue = batcher()
    queue.add(piece(A, 3, group="x"), 0.0)
    queue.add(piece(B, 3, group="y"), 0.0)
    assert cut(queue.take(0.0)) == [(A, 0, 3)]
    assert queue.take(0.0) == ()
    assert cut(queue.take(LATENCY_S)) == [(B, 0, 3)]


def test_task_may_have_so_many_pieces_unanswered_and_no_more() -> None:
    queue = batcher(A)
    for number in range(MAX_PIECES):
        queue.add(piece(A, SIZE, number), 0.0)
    with pytest.raises(ProtocolError, match="may not send"):
        queue.add(piece(A, SIZE, MAX_PIECES), 0.0)
    (part,) = queue.take(0.0)
    with pytest.raises(ProtocolError, match="may not send"):  # taken, not answered
        queue.add(piece(A, SIZE, MAX_PIECES), 0.0)
    queue.answer(part.piece)
    queue.add(piece(A, SIZE, MAX_PIECES), 0.0)
    for wrong in (piece(B, 1), piece(A, 0)):
        with pytest.raises(ProtocolError, match="may not send"):
            queue.add(wrong, 0.0)


def test_task_that_leaves_takes_its_rows_with_it_and_holds_up_nobody() -> None:
    queue = batcher()
    queue.add(piece(A, 3), 0.0)
    queue.add(piece(B, 3), 0.0)
    queue.leave(A)
    queue.end(B)
    assert cut(queue.take(0.0)) == [(B, 0, 3)]
    queue.answer(piece(A, 3))  # it was under way: nobody minds
    assert queue.tasks == 1


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 25)), max_size=40))
def test_every_row_is_scored_once_and_in_its_tasks_order(sent: list[tuple[int, int]]) -> None:
    queue = batcher(*range(4))
    numbers = dict.fromkeys(range(4), 0)
    done: dict[int, list[tuple[int, int]]] = {task: [] for task in range(4)}

    def score(now_s: float) -> None:
        while parts := queue.take(now_s):
            assert 0 < sum(part.rows for part in parts) <= SIZE
            for part in parts:
                rows = range(part.start, part.stop)
                done[part.piece.task] += [(part.piece.number, row) for row in rows]
                if part.stop == part.piece.rows:
                    queue.answer(part.piece)

    expected: dict[int, list[tuple[int, int]]] = {task: [] for task in range(4)}
    for now_s, (task, rows) in enumerate(sent):
        queue.add(piece(task, rows, numbers[task]), float(now_s))
        expected[task] += [(numbers[task], row) for row in range(rows)]
        numbers[task] += 1
        score(float(now_s))
        score(now_s + LATENCY_S)
    assert done == expected
