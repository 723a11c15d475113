"""What stands on a terminal after all that was written to it."""

from __future__ import annotations


def on_screen(written: str) -> list[str]:
    """Return the lines: each carriage return begins its line anew, and wipes nothing out."""
    lines = []
    for line in written.replace("\r\n", "\n").split("\n"):
        seen = ""
        for part in line.split("\r"):
            seen = part + seen[len(part) :]
        lines.append(seen.rstrip())
    return lines
