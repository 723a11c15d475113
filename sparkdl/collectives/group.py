"""`connect`: from ranks and a rendezvous to a group of all that train.

Runs in: child
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from sparkdl.collectives.base import Group, Op
from sparkdl.collectives.single import SingleMemberGroup
from sparkdl.core.errors import FrameworkMissingError

__all__ = ["Group", "Op", "connect"]

TRANSPORTS = {"gloo": "torch", "tensorflow": "tensorflow"}
"""By worth: the module in this package, and the distribution that it needs on all nodes. Each
has `Offer(rank, size, host, timeout_s)` with `address` (plain values, for the other members),
`connect(addresses, key) -> Group` and `withdraw()`."""


def connect(
    rank: int,
    size: int,
    all_gather: Callable[[Any], list[Any]],
    host: str,
    timeout_s: float,
    transport: str | None = None,
) -> Group:
    """Connect the members of a world; all of them call this.

    Args:
        all_gather: returns the plain values that the members have called it with, by rank; called
            twice, over connections that outsiders cannot read.
        host: under which the other members reach this one.
        timeout_s: of the connecting, and of each operation.
        transport: `gloo` or `tensorflow`; by default the best that all members have installed.

    Raises:
        FrameworkMissingError: if the members have no transport in common.
        CollectiveError: if they do not reach each other.
    """
    if size == 1:
        return SingleMemberGroup(rank)
    wanted = list(TRANSPORTS) if transport is None else [transport]
    installed = [name for name in wanted if _has(name)]
    key = secrets.token_bytes(32)
    hello = all_gather({"transports": installed, "key": key})
    common = [name for name in wanted if all(name in each["transports"] for each in hello)]
    if not common:
        raise FrameworkMissingError(
            f"the {size} nodes have no way of reducing in common: they have "
            f"{[each['transports'] for each in hello]}, by rank. Install PyTorch on all of them: "
            "pip install torch"
        )
    module = import_module(f"sparkdl.collectives.{common[0]}")
    offer = module.Offer(rank, size, host, timeout_s)
    try:
        addresses = all_gather(offer.address)
        group: Group = offer.connect(addresses, hello[0]["key"])
    except BaseException:
        offer.withdraw()
        raise
    return group


def _has(transport: str) -> bool:
    there = find_spec(f"sparkdl.collectives.{transport}") is not None
    return there and find_spec(TRANSPORTS[transport]) is not None
