"""The cluster's secret token, and what a feeder asks the coordinator with it: why no node answers.

Nodes that have ended cannot say it. The nodes of a cluster that has failed or finished end after a
few seconds, and a Spark task may come later. It is an HTTP `GET` with the token.
"""

from __future__ import annotations

import hmac
import secrets
from contextlib import closing
from http import HTTPStatus
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from sparkdl.control.tls import Trust


CAUSE_PATH = "/cause"
FINISHED = HTTPStatus.GONE
"""The status of the answer once every `map_fun` has returned."""


def new_token() -> str:
    return secrets.token_urlsafe(32)


def bearer(token: str) -> str:
    """Return the value of the `Authorization` header for `token` (RFC 6750)."""
    return f"Bearer {token}"


def is_authorized(header: str | None, token: str) -> bool:
    given = (header or "").encode(errors="surrogatepass")  # a header may hold any bytes
    return hmac.compare_digest(given, bearer(token).encode())


def fetch_cause(
    coordinator: str, token: str, trust: Trust | None = None, timeout_s: float = 5.0
) -> str | None:
    """Return why the cluster has failed; empty if it has not; None if it has finished.

    Args:
        coordinator: the URL that agents connect to.
        trust: the certificate it must present, if the URL is `wss://`.
        timeout_s: of connecting, and of each wait for data.

    Raises:
        OSError: if the coordinator does not answer: the cluster was shut down, as a rule.
    """
    # Few feeders ever ask: the import would cost every one of them 50 ms at its first row.
    from http.client import HTTPConnection, HTTPException

    url = urlsplit(coordinator)
    assert url.hostname
    assert url.port
    try:
        with closing(HTTPConnection(url.hostname, url.port, timeout=timeout_s)) as connection:
            if trust is not None:
                # HTTPSConnection would look for the host's name, which the certificate lacks.
                connection.sock = trust.connect(url.hostname, url.port, timeout_s)
            else:
                connection.connect()
            connection.request("GET", CAUSE_PATH, headers={"Authorization": bearer(token)})
            answer = connection.getresponse()
            cause = answer.read().decode()
    except HTTPException as error:
        raise OSError(f"the coordinator does not answer: {error!r}") from None
    if answer.status == FINISHED:
        return None
    if answer.status != HTTPStatus.OK:
        raise OSError(f"the coordinator does not answer: {answer.status} {answer.reason}")
    return cause
