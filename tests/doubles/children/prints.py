"""Prints on both streams, from Python, from below Python and from another process, in turn."""

from __future__ import annotations

import os
import subprocess
import sys

for i in range(3):
    print(f"out {i}", flush=True)
    print(f"err {i}", file=sys.stderr, flush=True)
    os.write(1, f"raw {i}\n".encode())
    subprocess.run(["/bin/sh", "-c", f"echo shell {i}"], check=True)
