"""Says `up`, then outlives SIGTERM and waits for what does not come."""

from __future__ import annotations

import signal

signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("up", flush=True)
while True:
    signal.pause()
