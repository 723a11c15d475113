"""`ctx.all_gather` and `ctx.barrier`: small values from every node to every node.

Runs in: child

They go through the driver: for addresses, seeds, counts and agreements, whatever the framework.
Tensors belong into the framework's own collectives.
"""

from __future__ import annotations

import threading
from typing import Any

from sparkdl.control.channel import Given
from sparkdl.control.values import decode_value, encode_value
from sparkdl.core.deadline import Deadline
from sparkdl.core.errors import ConfigError, CoordinationError, ResultError
from sparkdl.core.spec import ClusterSpec
from sparkdl.core.world import Member
from sparkdl.node.link import AgentLink


class Gathering:
    """What `ctx` offers for the nodes that train to agree on something."""

    member: Member
    _spec: ClusterSpec
    _link: AgentLink

    def __init__(self) -> None:
        self._gathering = threading.Lock()
        self._num_gatherings = 0

    def all_gather(self, value: Any, timeout_s: float | None = None) -> list[Any]:
        """Return the values that all nodes which train gave to this call, by rank.

        Call it on chief and workers, equally often. Like `BarrierTaskContext.allGather` of Spark.

        Args:
            value: None, booleans, numbers, strings, bytes, numpy arrays, and lists, tuples, sets
                and dicts of them; some 12 MB at most for all nodes together.
            timeout_s: seconds to wait for the others, by default the launch's `feed_timeout`.

        Raises:
            ConfigError: on a node that does not train, or for a value that cannot travel.
            CoordinationError: if a node did not call in time, or returned without it.
        """
        if not self.member.role.is_trainer or self.member.role.is_server:
            raise ConfigError(
                f"{self.member.node.name} does not train: call ctx.all_gather and ctx.barrier on "
                "chief and workers"
            )
        timeout_s = self._spec.settings.feed_timeout_s if timeout_s is None else timeout_s
        try:
            data = encode_value(value)
        except ResultError as error:
            raise ConfigError(f"ctx.all_gather cannot send this value: {error}") from None
        with self._gathering:
            number, self._num_gatherings = self._num_gatherings, self._num_gatherings + 1
            self._link.send(Given(number, data))
            news = self._link.wait_gathered(number, Deadline.after(timeout_s))
        if news is None:
            raise CoordinationError(
                f"not all nodes called ctx.all_gather or ctx.barrier within {timeout_s:g} s; this "
                f"was call {number + 1} of {self.member.node.name}. cluster.stacks() shows what "
                "the nodes are doing"
            )
        if news.problem:
            raise CoordinationError(
                f"call {number + 1} of ctx.all_gather or ctx.barrier has no end: {news.problem}"
            )
        return [decode_value(part) for part in news.values]

    def barrier(self, timeout_s: float | None = None) -> None:
        """Wait until all nodes that train have called this; see `all_gather`."""
        self.all_gather(None, timeout_s)
