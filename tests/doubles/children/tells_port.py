"""Prints the port of the socket that it inherited (argument 2), then ends."""

from __future__ import annotations

import socket
import sys

with socket.socket(fileno=int(sys.argv[2])) as held:
    print(held.getsockname()[1], flush=True)
