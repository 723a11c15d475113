"""A lost port is worth another try, so often and no more; everything else fails the cluster."""

from __future__ import annotations

import pytest

from sparkdl.core.failure import Failure, FailureKind
from sparkdl.core.settings import Settings
from sparkdl.driver.policy import Fail, Retry, decide

SETTINGS = Settings(max_port_retries=2)
PORT = Failure("worker:1", "port", "address in use", 2.0)


@pytest.mark.parametrize("kind", ["exception", "exit", "signal", "oom", "lost", "setup"])
def test_whatever_is_no_port_fails_the_cluster(kind: FailureKind) -> None:
    assert decide([Failure("ps:0", kind, "", 1.0)], 0, SETTINGS) == Fail(
        "user code or a node failed"
    )


@pytest.mark.parametrize("retries", [0, 1])
def test_a_lost_port_is_tried_again(retries: int) -> None:
    assert decide([PORT], retries, SETTINGS) == Retry(
        f"worker:1 lost its port to another process; retry {retries + 1} of 2 on new ports"
    )


def test_what_fails_because_another_lost_its_port_does_not_stop_the_retry() -> None:
    failures = [Failure("chief:0", "exception", "cannot connect", 1.0), PORT]
    assert isinstance(decide(failures, 0, SETTINGS), Retry)


@pytest.mark.parametrize("retries", [2, 3])
def test_after_so_many_retries_a_lost_port_is_a_failure(retries: int) -> None:
    assert decide([PORT], retries, SETTINGS) == Fail(
        f"ports were lost to other processes {retries + 1} times in a row"
    )


def test_without_retries_the_first_lost_port_is_a_failure() -> None:
    assert isinstance(decide([PORT], 0, Settings(max_port_retries=0)), Fail)
