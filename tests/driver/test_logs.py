"""What is kept of the output of children that have ended."""

from __future__ import annotations

from sparkdl.driver.logs import MAX_LINES, Attempt, LastAttempts, joined


def test_of_a_node_no_more_lines_are_kept_than_of_one_child_the_newest() -> None:
    last, long = LastAttempts(), tuple(f"line {n}" for n in range(MAX_LINES - 10))
    last.keep(0, Attempt(0, long))
    last.keep(0, Attempt(1, long))
    last.keep(1, Attempt(0, ("of another node",)))
    assert last.before(0) == [Attempt(0, long[-10:]), Attempt(1, long)]
    last.keep(0, Attempt(2, (*long, *long)[:MAX_LINES]))
    assert [attempt.generation for attempt in last.before(0)] == [2]
    for generation in range(3, 500):
        last.keep(0, Attempt(generation, ("failed",)))
    assert sum(len(attempt.lines) for attempt in last.before(0)) <= MAX_LINES
    assert len(last.before(0, generation=499)) == len(last.before(0)) - 1


def test_a_child_that_begins_again_in_its_generation_takes_the_place_of_the_first() -> None:
    last = LastAttempts()
    last.keep(0, Attempt(0, ("the port is taken",)))
    last.keep(0, Attempt(0, ("begun",)))
    assert last.before(0) == [Attempt(0, ("begun",))]


def test_an_attempt_that_has_printed_nothing_yet_is_seen_to_have_begun() -> None:
    attempts = [Attempt(0, ("one", "two")), Attempt(1, ())]
    headings = ["sparkdl: attempt 1 (generation 0)", "sparkdl: attempt 2 (generation 1)"]
    assert joined(attempts, 1) == (headings[0], "two", headings[1])
    assert joined([], 5) == ()
    assert joined(attempts[:1], 0) == ()
