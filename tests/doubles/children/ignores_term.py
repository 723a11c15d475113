"""Says `up`, outlives SIGTERM, saying so, and waits for what does not come."""

from __future__ import annotations

import signal

signal.signal(signal.SIGTERM, lambda *_: print("terminated", flush=True))
print("up", flush=True)
while True:
    signal.pause()
