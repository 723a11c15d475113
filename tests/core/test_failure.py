"""A failure says who, where and what in one line, and the whole story on demand."""

from __future__ import annotations

import pytest

from sparkdl.core.failure import Failure, FailureKind


def failure(kind: FailureKind, message: str = "", **fields: object) -> Failure:
    return Failure("worker:1", kind, message, 1.0, rank=2, pid=345, host="exec-7", **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("what", "verb"),
    [
        (failure("exception", "ValueError: bad"), "raised ValueError: bad"),
        (failure("exit", exit_code=7), "ended with exit code 7."),
        (failure("exit", "Bye", exit_code=0), "ended with exit code 0. Bye"),
        (failure("signal", signal_number=11), "was killed by SIGSEGV."),
        (failure("signal", "Odd", signal_number=99), "was killed by signal 99. Odd"),
        (failure("signal", "its exit status is unknown"), "failed: its exit status is unknown"),
        (failure("oom", signal_number=9), "was killed for lack of memory."),
        (failure("lost", "its connection closed"), "was lost: its connection closed"),
        (failure("unreachable", "cannot be reached"), "cannot be reached"),
        (failure("port", "in use"), "failed: in use"),
        (failure("setup", "no module named tensorflow"), "failed: no module named tensorflow"),
    ],
)
def test_headline_says_who_where_and_what(what: Failure, verb: str) -> None:
    assert what.headline() == f"worker:1 (rank 2, pid 345) on exec-7 {verb}"


def test_story_is_headline_traceback_and_last_log_lines() -> None:
    trace = "Traceback …\nValueError: bad\n"
    what = failure("exception", "ValueError: bad", traceback=trace, log_tail=("a", "b"))
    assert what.describe() == (
        "worker:1 (rank 2, pid 345) on exec-7 raised ValueError: bad\n"
        "Traceback …\nValueError: bad\n"
        "Last log lines of worker:1:\n  | a\n  | b"
    )


@pytest.mark.parametrize(
    ("kind", "setting"),
    [
        ("oom", "spark.executor.memoryOverhead"),
        ("lost", "spark.dynamicAllocation"),
        ("exit", "last log lines"),
        ("signal", "native crash"),
    ],
)
def test_story_that_python_cannot_explain_hints_at_places(kind: FailureKind, setting: str) -> None:
    headline, hint = failure(kind, exit_code=1, signal_number=9).describe().split("\n", 1)
    assert "worker:1" in headline
    assert setting in hint
