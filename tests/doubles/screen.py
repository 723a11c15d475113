"""A terminal for a program, and what stands on one after all that was written to it.

Runs in: the process of pytest
"""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from contextlib import suppress


def written_by(program: str, columns: int) -> str:
    """Run a Python program on a terminal of its own to its end; return all that it writes there."""
    main, side = pty.openpty()
    fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    command = [sys.executable, "-c", program]
    running = subprocess.Popen(command, stdin=side, stdout=side, stderr=side)
    os.close(side)
    written = b""
    with open(main, "rb", buffering=0) as terminal, suppress(OSError):  # which is its end
        while data := terminal.read(65536):
            written += data
    assert running.wait() == 0, written.decode()
    return written.decode()


def on_screen(written: str) -> list[str]:
    """Return the lines: each carriage return begins its line anew, and wipes nothing out."""
    lines = []
    for line in written.replace("\r\n", "\n").split("\n"):
        seen = ""
        for part in line.split("\r"):
            seen = part + seen[len(part) :]
        lines.append(seen.rstrip())
    return lines
