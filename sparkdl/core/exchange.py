"""Whether sparkdl has exchanged something between this process and other nodes.

Runs in: child

Collectives, meshes and `ctx.all_gather` note it here; see frameworks/independent_models.py.
"""

from __future__ import annotations

import threading

_is_used = threading.Event()


def mark_collective_used() -> None:
    _is_used.set()


def is_collective_used() -> bool:
    return _is_used.is_set()
