"""Trains a ledger (`tests/doubles/ledger.py`) and says what became of its rows.

Arguments: the folder of the checkpoints, rows, epochs, calls of `feed`, seconds of a step.
"""

from __future__ import annotations

import json
import sys
from functools import partial

from sparkdl.core.options import Recovery
from sparkdl.core.settings import Settings
from sparkdl.driver import launch as launching
from tests.doubles.drivers.driver import start
from tests.doubles.ledger import Plan, lost_and_doubled, table, train

LEASE_S = 1.0
HANG_S = 3.0

folder, rows, epochs, calls, pause_s = (sys.argv[1], *map(int, sys.argv[2:5]), float(sys.argv[5]))
settings = partial(Settings, restart_window_s=1.0, lease_s=LEASE_S)
setattr(launching, "Settings", settings)  # noqa: B010 (what launch has no arguments for)
with start(
    train,
    args=Plan(every=5, pause_s=pause_s),
    checkpoint_dir=folder,
    max_restarts=1000,
    recovery=Recovery(hang_timeout_s=HANG_S, on_hang="fail"),
) as cluster:
    for _ in range(calls):
        cluster.feed(table(rows, 3), epochs=epochs)
    parts = cluster.results(300)
    lost, doubled = lost_and_doubled(parts, rows, epochs * calls)
    generation = cluster.world.generation
print(json.dumps({"lost": lost, "doubled": doubled, "generation": generation}), flush=True)
