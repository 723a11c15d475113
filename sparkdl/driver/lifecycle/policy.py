"""The decision about failures: fail, retry on new ports, or restart. Pure."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from sparkdl.core.failure import Failure
from sparkdl.core.settings import Settings

HOPELESS = frozenset(
    {
        *("ConfigError", "FrameworkMissingError", "FeedTypeError", "RemovedError"),
        *("ImportError", "ModuleNotFoundError", "SyntaxError", "IndentationError"),
        *("UnfedError", "EndOfFeedError"),
    }
)
"""Errors in the program itself: another start would fail the same way."""

FROM_OUTSIDE = frozenset(
    {
        *("ConnectionError", "ConnectionResetError", "ConnectionRefusedError", "TimeoutError"),
        *("ConnectionAbortedError", "BrokenPipeError", "UnavailableError", "AbortedError"),
        *("DeadlineExceededError", "DistNetworkError", "DistBackendError", "DistStoreError"),
        *("CollectiveError", "MismatchError"),
    }
)
"""Errors that a lost peer or the network causes, of Python, TensorFlow and PyTorch."""

_ENDED_FROM_OUTSIDE = (None, signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
"""Signals that end a healthy child. `None`: the exit status, maybe one of these, is unknown."""
_ADDRESS = re.compile(r"0x[0-9a-f]+")


@dataclass(frozen=True)
class History:
    """The restarts and retries of a cluster so far.

    Attributes:
        port_retries: rounds that were started because a port was lost.
        restarts_s: when each restart was, by a monotonic clock.
        cause: the failure that led to the last restart.
    """

    port_retries: int = 0
    restarts_s: tuple[float, ...] = ()
    cause: Failure | None = None


@dataclass(frozen=True)
class Fail:
    reason: str = ""


@dataclass(frozen=True)
class Retry:
    """Start another round of children on new ports; user code has not trained yet."""

    reason: str


@dataclass(frozen=True)
class Restart:
    """Start another round of children, at the last checkpoint."""

    reason: str


Decision = Fail | Retry | Restart


def decide(
    failures: Sequence[Failure], history: History, settings: Settings, now_s: float = 0.0
) -> Decision:
    """Return what to do about `failures` of one round."""
    lost_ports = [failure for failure in failures if failure.kind == "port"]
    if lost_ports and history.port_retries < settings.max_port_retries:
        return Retry(
            f"{lost_ports[0].node} lost its port to another process; retry "
            f"{history.port_retries + 1} of {settings.max_port_retries} on new ports"
        )
    if lost_ports:
        return Fail(f"ports were lost to other processes {history.port_retries + 1} times in a row")
    # Without a reason in the error: the user asked for no restarts.
    if not settings.can_restart:
        return Fail()
    cause = min(failures, key=lambda failure: failure.order)
    if cause.kind == "setup" or _error_name(cause) in HOPELESS:
        return Fail("another start would fail the same way: not restarted")
    if history.cause is not None and is_same(cause, history.cause):
        return Fail("failed the same way at the same step twice: not restarted again")
    # A training of weeks may restart often: only the restarts of the window count.
    recent = sum(now_s - at_s <= settings.restart_window_s for at_s in history.restarts_s)
    if recent >= settings.max_restarts:
        return Fail(f"max_restarts={settings.max_restarts} are used up")
    number = f"restart {recent + 1} of {settings.max_restarts}"
    return Restart(f"{number} because {cause.headline().splitlines()[0]}")


def is_same(failure: Failure, before: Failure) -> bool:
    """Whether two failures in a row have one cause in the program, which will come again."""
    return not _is_from_outside(failure) and _cause(failure) == _cause(before)


def _is_from_outside(failure: Failure) -> bool:
    if failure.is_consequence:
        return True
    if failure.kind == "signal":
        return failure.signal_number in _ENDED_FROM_OUTSIDE
    kinds = ("lost", "unreachable", "oom", "hang")
    return failure.kind in kinds or _error_name(failure) in FROM_OUTSIDE


def _error_name(failure: Failure) -> str:
    return failure.exception_type.rpartition(".")[2]


def _cause(failure: Failure) -> tuple[object, ...]:
    # The innermost place of the traceback and the step identify a failure. Addresses of objects in
    # its text differ from process to process.
    frames = [line for line in failure.traceback.splitlines() if line.startswith("  File ")]
    return (
        *(failure.kind, failure.exception_type, failure.exit_code, failure.signal_number),
        *(_ADDRESS.sub("", failure.message), frames[-1:], failure.step),
    )
