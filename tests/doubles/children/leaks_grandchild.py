"""Starts a process that would never end, prints its pid, and ends without it."""

from __future__ import annotations

import subprocess
import sys

grandchild = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
print(grandchild.pid, flush=True)
