"""What is worth another round, and what is not: the whole of the policy, as a table."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sparkdl.core.failure import Failure, FailureKind
from sparkdl.core.settings import Settings
from sparkdl.driver.lifecycle.policy import Decision, Fail, History, Restart, Retry, decide

SETTINGS = Settings(max_port_retries=2)
PORT = Failure("worker:1", "port", "address in use", 2.0)

RESTARTS = Settings(max_restarts=3, restart_window_s=100.0)
TRACE = '  File "train.py", line {}, in train\n    raise'
ERROR = Failure(
    *("worker:1", "exception", "ValueError: no", 2.0),
    exception_type="builtins.ValueError",
    traceback=TRACE.format(7),
    step=5,
)
KILLED = Failure("worker:0", "signal", "", 1.0, signal_number=9, step=5)
UNKNOWN = replace(KILLED, signal_number=None)
SEGFAULT = replace(KILLED, signal_number=11)
LOST = Failure("worker:0", "lost", "its connection closed", 1.0)
EXIT = Failure("worker:0", "exit", "", 1.0, exit_code=3)
PEER = replace(ERROR, exception_type="tensorflow...UnavailableError", message="socket closed")
BROKEN = replace(ERROR, message="Connection reset by peer", time_s=0.5, is_consequence=True)
AGAIN = "failed the same way at the same step twice: not restarted again"
HOPELESS = "another start would fail the same way: not restarted"


@pytest.mark.parametrize("kind", ["exception", "exit", "signal", "oom", "lost", "setup", "hang"])
def test_without_restarts_whatever_is_no_port_fails_the_cluster(kind: FailureKind) -> None:
    assert decide([Failure("ps:0", kind, "", 1.0)], History(), SETTINGS) == Fail()


RETRY = "worker:1 lost its port to another process; retry {} of 2 on new ports"
LOST_PORTS = "ports were lost to other processes {} times in a row"


@pytest.mark.parametrize(
    ("retries", "most", "decision"),
    [
        (0, 2, Retry(RETRY.format(1))),
        (1, 2, Retry(RETRY.format(2))),
        (2, 2, Fail(LOST_PORTS.format(3))),
        (3, 2, Fail(LOST_PORTS.format(4))),
        (0, 0, Fail(LOST_PORTS.format(1))),
    ],
)
def test_lost_port_is_tried_again_so_often(retries: int, most: int, decision: Decision) -> None:
    settings = Settings(max_port_retries=most)
    assert decide([PORT], History(retries), settings) == decision
    because_of_it = Failure("chief:0", "exception", "cannot connect", 1.0)
    assert decide([because_of_it, PORT], History(retries), settings) == decision


def restart(number: int, failure: Failure) -> Restart:
    return Restart(f"restart {number} of 3 because {failure.headline()}")


TABLE: list[tuple[list[Failure], History, Decision]] = [
    # Whatever can be better the next time, in the order in which it happened.
    ([ERROR], History(), restart(1, ERROR)),
    ([EXIT], History(), restart(1, EXIT)),
    ([LOST, ERROR], History(), restart(1, LOST)),
    ([ERROR, KILLED], History(), restart(1, KILLED)),
    # Who says that another node is gone is no cause, if another node is.
    ([BROKEN, KILLED], History(), restart(1, KILLED)),
    ([BROKEN], History(0, (990.0,), BROKEN), restart(2, BROKEN)),
    # One that is long ago does not count.
    ([ERROR], History(0, (990.0,)), restart(2, ERROR)),
    ([ERROR], History(0, (980.0, 990.0)), restart(3, ERROR)),
    ([ERROR], History(0, (900.0, 980.0, 990.0)),
     Fail("max_restarts=3 are used up")),
    ([ERROR], History(0, (899.0, 980.0, 990.0)), restart(3, ERROR)),
    ([ERROR], History(0, (100.0, 200.0, 300.0)), restart(1, ERROR)),
    # What says that the program is wrong.
    ([replace(ERROR, kind="setup")], History(), Fail(HOPELESS)),
    ([replace(ERROR, exception_type="sparkdl.core.errors.ConfigError")], History(), Fail(HOPELESS)),
    ([replace(ERROR, exception_type="builtins.ModuleNotFoundError")], History(), Fail(HOPELESS)),
    # The same again.
    ([ERROR], History(0, (990.0,), ERROR), Fail(AGAIN)),
    ([replace(ERROR, node="worker:0", time_s=9.0)], History(0, (990.0,), ERROR), Fail(AGAIN)),
    ([SEGFAULT], History(0, (990.0,), SEGFAULT), Fail(AGAIN)),
    ([EXIT], History(0, (990.0,), EXIT), Fail(AGAIN)),
    ([replace(ERROR, message="no <a at 0x7f3b>")],
     History(0, (990.0,), replace(ERROR, message="no <a at 0x11>")), Fail(AGAIN)),
    # Another step, place, word or code; or what comes from outside.
    ([replace(ERROR, step=6)], History(0, (990.0,), ERROR), restart(2, ERROR)),
    ([replace(ERROR, traceback=TRACE.format(8))], History(0, (990.0,), ERROR),
     restart(2, ERROR)),
    ([replace(ERROR, traceback=f"{TRACE.format(1)}\n{TRACE.format(7)}")],
     History(0, (990.0,), replace(ERROR, traceback=f"{TRACE.format(1)}\n{TRACE.format(8)}")),
     restart(2, ERROR)),
    ([EXIT], History(0, (990.0,), replace(EXIT, exit_code=4)), restart(2, EXIT)),
    ([KILLED], History(0, (990.0,), KILLED), restart(2, KILLED)),
    ([UNKNOWN], History(0, (990.0,), UNKNOWN), restart(2, UNKNOWN)),
    ([LOST], History(0, (990.0,), LOST), restart(2, LOST)),
    ([PEER], History(0, (990.0,), PEER), restart(2, PEER)),
    ([replace(LOST, kind="oom")], History(0, (990.0,), replace(LOST, kind="oom")),
     restart(2, replace(LOST, kind="oom"))),
]  # fmt: skip
"""Failures of one round at 1000 s, what was before, what is decided."""


@pytest.mark.parametrize(("failures", "history", "decision"), TABLE)
def test_table(failures: list[Failure], history: History, decision: Decision) -> None:
    assert decide(failures, history, RESTARTS, 1000.0) == decision


def test_reason_is_one_line_though_the_message_has_many() -> None:
    decision = decide([replace(ERROR, message="a\nb")], History(), RESTARTS)
    assert isinstance(decision, Restart)
    assert decision.reason.endswith("raised a")
