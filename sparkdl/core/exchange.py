"""Whether sparkdl has exchanged something between this process and other nodes.

Runs in: child

Collectives, meshes and `ctx.all_gather` note it here; `frameworks/lone_training.py` looks for the
connections of frameworks.
"""

from __future__ import annotations

import threading

_happened = threading.Event()


def note_exchange() -> None:
    _happened.set()


def has_exchanged() -> bool:
    return _happened.is_set()
