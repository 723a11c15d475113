"""A server's place: the first of some ports that is free.

Runs in: driver
"""

from __future__ import annotations

import socket
from collections.abc import Sequence

from sparkdl.core.errors import ConfigError

BACKLOG = 4096
"""Agents that connect at once wait here. If it is full, the kernel retries a second later."""


def listening_socket(host: str, ports: Sequence[int], who: str, setting: str) -> socket.socket:
    """Return a socket that listens on `host` at the first free one of `ports`; 0 is any.

    Args:
        who: listens, for the error.
        setting: begins the names of the environment variables for host and port.
    """
    problem = ""  # no exception: its traceback would keep what the callers hold
    for port in ports:
        try:
            family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            return socket.create_server(address[:2], family=family, backlog=BACKLOG)
        except OSError as error:
            problem = str(error)
    first, last = ports[0], ports[-1]
    where = (
        f"ports {first}-{last}" if first != last else f"port {first}" if first else "any free port"
    )
    raise ConfigError(
        f"{who} cannot listen on {host}, {where}: {problem}. Set {setting}_HOST to "
        f"an address of this machine that its clients reach, and {setting}_PORT to a free port or "
        "range"
    )
