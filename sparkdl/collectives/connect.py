"""`connect`: the group of all nodes that train."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from datetime import timedelta
from importlib.util import find_spec
from typing import Any

from sparkdl.collectives.group import Group
from sparkdl.collectives.transport import Alone, Transport
from sparkdl.core.errors import CollectiveError, FrameworkMissingError
from sparkdl.core.exchange import note_exchange

CONNECT_TIMEOUT_S = 300.0
"""Until the members have reached each other, at most."""


def connect(
    rank: int,
    size: int,
    all_gather: Callable[[Any], list[Any]],
    host: str,
    timeout_s: float,
) -> Group:
    """Connect the members of a world; all of them call this.

    Args:
        all_gather: exchanges plain values of the members, returned by rank, over connections that
            outsiders cannot read.
        host: under which the other members reach this one.
        timeout_s: of the connecting, and of each operation.

    Raises:
        FrameworkMissingError: if not all members have PyTorch, whose gloo and NCCL connect them.
        CollectiveError: if they do not reach each other.
    """
    if size == 1:
        return Group(0, (rank,), Alone())
    note_exchange()
    has_torch = find_spec("torch") is not None
    # First, so that its port can travel with the other values.
    store = _store(host, 0, rank, timeout_s) if has_torch and rank == 0 else None
    hello = {"torch": has_torch, "key": secrets.token_bytes(32), "host": host}
    everyone = all_gather({**hello, "port": store.port if store else 0})
    if missing := [number for number, each in enumerate(everyone) if not each["torch"]]:
        raise FrameworkMissingError(
            f"{len(missing)} of {size} nodes have no PyTorch (ranks {missing[:8]}), by which nodes "
            "of any framework exchange tensors. Install it on all of them: pip install torch"
        )
    first = everyone[0]
    store = store or _store(first["host"], first["port"], rank, timeout_s)
    key = first["key"]

    def wire(number: str, rank: int, size: int) -> Transport:
        from torch.distributed import PrefixStore

        # Groups share the store, and each has names of its own in it.
        return Transport(rank, size, PrefixStore(number, store), host, timeout_s)

    return Group(rank, range(size), wire("world", rank, size), key, wire)


def _store(host: str, port: int, rank: int, timeout_s: float) -> Any:
    """Return the store of rank 0, which listens on a free port; the others reach it there."""
    from torch.distributed import TCPStore

    timeout = timedelta(seconds=min(timeout_s, CONNECT_TIMEOUT_S))
    try:
        return TCPStore(host, port, None, rank == 0, timeout, wait_for_workers=False)
    except RuntimeError as error:
        raise CollectiveError(
            f"rank {rank} does not reach rank 0 at {host}:{port}: {error}. Nodes must reach each "
            "other on all ports"
        ) from error
