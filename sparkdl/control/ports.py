"""A server's place: the first of some ports that is free.

Runs in: driver
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence

from sparkdl.core.errors import ConfigError

BACKLOG = 4096
"""Agents that connect at once wait here; one that finds it full tries again a second later."""


def listening_socket(
    host: str, ports: Sequence[int], cannot: Callable[[str], ConfigError]
) -> socket.socket:
    """Return a socket that listens on `host` at the first of `ports` that is free; 0 is any.

    Args:
        cannot: makes an error of what the system says of the last port.

    Raises:
        ConfigError: if none is free, or the host is not this machine.
    """
    problem = ""  # no exception: its traceback would keep what the callers hold
    for port in ports:
        try:
            family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            return socket.create_server(address[:2], family=family, backlog=BACKLOG)
        except OSError as error:
            problem = str(error)
    raise cannot(problem)
