"""How a node failed, as data; codes by which an error is recognised in text."""

from __future__ import annotations

import json
import re
import signal
from dataclasses import dataclass
from enum import Enum
from typing import Literal

FailureKind = Literal[
    "exception", "exit", "signal", "oom", "lost", "unreachable", "port", "setup", "hang"
]

_MORE_MEMORY = (
    "Give the executors more memory outside the JVM (spark.executor.memoryOverhead), lower the "
    "batch size, or lower Feeding(memory_nbytes=…)."
)
_HINTS: dict[str, str] = {
    "oom": f"The kernel killed it for memory. {_MORE_MEMORY}",
    "lost": (
        "Look for a lost executor in the Spark UI, and for spark.dynamicAllocation or "
        "spark.executor.memoryOverhead as its reason."
    ),
    "unreachable": (
        "Look at the network between these hosts (routes, firewalls). If they reach each other at "
        "other addresses, set SPARKDL_NODE_HOST on their executors to these."
    ),
    "hang": (
        "The hang watch (Recovery(hang_timeout_s=…)) stopped it; its stacks are above, innermost "
        "call first. Call ctx.report(step=…) in longer loops that read no feed, or raise "
        "Recovery(hang_timeout_s=…)."
    ),
    "exit": "User code or a library ended the process without raising; see its last log lines.",
    "signal": "It was ended from outside Python: by a native crash, an operator or the kernel.",
}


@dataclass(frozen=True)
class Failure:
    """One node's failure. Plain data, so that it crosses every process border unchanged.

    Attributes:
        node: `role:index`, for example `worker:1`.
        rank: the node's rank in its world, -1 before there was a world.
        kind: what ended the child. `exception`: user code raised. `exit`: it ended with
            `exit_code` and no exception. `signal`: killed by `signal_number`; without a number the
            exit status is unknown, because the parent ended first. `oom`: killed by the kernel for
            memory. `lost`: the agent vanished. `unreachable`: another node's agent, which the
            driver reaches, does not answer it. `port`: another process took the framework's port.
            `setup`: the node could not prepare. `hang`: no progress; `traceback` has its stacks.
        time_s: Unix time in seconds, by the driver's clock once the driver has it.
        step: of the checkpoint that the node resumed from, plus the batches read since then.
        is_consequence: it says that a connection to another node has broken. That node's own
            failure is the cause, even if it is reported later.
    """

    node: str
    kind: FailureKind
    message: str
    time_s: float
    node_id: int = -1
    rank: int = -1
    host: str = ""
    pid: int = 0
    exit_code: int | None = None
    signal_number: int | None = None
    exception_type: str = ""
    traceback: str = ""
    log_tail: tuple[str, ...] = ()
    generation: int = 0
    step: int = 0
    is_consequence: bool = False

    @property
    def order(self) -> tuple[bool, float]:
        """Sorts failures: the root cause is the first that is no consequence, if there is one."""
        return self.is_consequence, self.time_s

    def headline(self) -> str:
        """Return the failure in one line: node, host, cause."""
        where = f" on {self.host}" if self.host else ""
        who = f"{self.node} (rank {self.rank}, pid {self.pid}){where}"
        return f"{who} {self._verb()}"

    def describe(self) -> str:
        """Return the whole text: headline, traceback or hint, last log lines."""
        parts = [self.headline()]
        if self.traceback:
            parts.append(self.traceback.rstrip())
        hint = _HINTS.get(self.kind, "")
        # An unknown exit status is no evidence of a signal, which the hint for this kind explains.
        if self.kind == "signal" and self.signal_number is None:
            hint = ""
        if hint:
            parts.append(hint)
        if self.log_tail:
            parts.append(f"Last log lines of {self.node}:")
            parts.extend(f"  | {line}" for line in self.log_tail)
        return "\n".join(parts)

    def _verb(self) -> str:
        if self.kind == "signal" and self.signal_number is not None:
            return f"was killed by {signal_name(self.signal_number)}. {self.message}".rstrip()
        verbs = {
            "exit": f"ended with exit code {self.exit_code}. ",
            "exception": "raised ",
            "oom": "was killed for lack of memory. ",
            "lost": "was lost: ",
            "unreachable": "",
            "hang": "hung: it ",
        }
        return f"{verbs.get(self.kind, 'failed: ')}{self.message}".rstrip()


def status_in_words(status: int) -> str:
    return f"exit code {status}" if status >= 0 else signal_name(-status)


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class Code(Enum):
    """Marks by which an error is recognised once Spark or Arrow Flight has made text of it.

    Neither carries an exception from one process to another: what arrives is its text, among text
    of their own. A code in brackets survives that, so the sentences around it can be reworded.
    """

    CLUSTER_FAILED = "SPARKDL-CLUSTER-FAILED"
    """No node answers any more, because the cluster has failed for good."""
    FEED_LOST = "SPARKDL-FEED-LOST"
    """A feeder has lost the connection to a node."""
    NULL_VALUE = "SPARKDL-NULL-VALUE"
    """A column that refuses nulls holds one. Value: the column's name."""
    RAISED = "SPARKDL-RAISED"
    """A Spark task raised an error for the driver to raise. Values: the error's class, its text."""
    WRONG_ANSWER = "SPARKDL-WRONG-ANSWER"
    """A node answered rows with too few or too many results: another node would do the same."""

    def __str__(self) -> str:
        return self.mark()

    def mark(self, *values: str) -> str:
        # As JSON, so that a value may contain quotes, brackets and line breaks.
        return f"[{' '.join([self.value, *map(json.dumps, values)])}]"

    def is_in(self, error: BaseException | str) -> bool:
        return self.values_in(error) is not None

    def values_in(self, error: BaseException | str) -> tuple[str, ...] | None:
        found = re.search(rf'\[{self.value}((?: "(?:[^"\\]|\\.)*")*)\]', str(error))
        if found is None:
            return None
        return tuple(map(json.loads, re.findall(r'"(?:[^"\\]|\\.)*"', found[1])))
