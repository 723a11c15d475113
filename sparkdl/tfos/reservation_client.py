"""`python -m sparkdl.tfos.reservation_client HOST PORT` asks the server there to end a stream.

Runs in: anywhere

As `stop_streaming.py` of TensorFlowOnSpark's examples does. It needs the server's token in the
environment variable `SPARKDL_RESERVATION_TOKEN`, and if the server has TLS the path of its
certificate in `SPARKDL_RESERVATION_CERT`.
"""

from __future__ import annotations

import sys
from contextlib import closing

from sparkdl.tfos.reservation import Client


def main(host: str, port: str) -> None:
    """Ask the server at an address to end."""
    with closing(Client((host, int(port)))) as client:
        client.request_stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
