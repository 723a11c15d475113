"""Whether sparkdl has exchanged something between this process and other nodes.

Runs in: child
"""

from __future__ import annotations

import threading

collective_used = threading.Event()
"""Set by collectives, meshes and `ctx.all_gather`; see frameworks/independent_models.py."""
