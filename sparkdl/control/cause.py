"""Why no node answers: a feeder asks the coordinator, because nodes that have ended cannot say.

Runs in: feeder, driver. The driver answers.

An HTTP `GET` with the token. The nodes of a cluster that has failed or finished end after a few
seconds, and a Spark task may come later. A feeder that asks because a node's host does not answer
it says so in the path: the link between the two may be cut, and the driver reach both.
"""

from __future__ import annotations

import re
from contextlib import closing
from dataclasses import dataclass
from http import HTTPStatus
from urllib.parse import urlsplit

from sparkdl.control.auth import bearer
from sparkdl.control.tls import Trust

CAUSE_PATH = "/cause"
CUT_PATH = "/cut/"
FINISHED = HTTPStatus.GONE
"""The status of the answer once every `map_fun` has returned."""
_CUT = re.compile(r"/cut/([0-9]{1,9})/([0-9]{1,9})/([0-9A-Za-z.:_-]{1,253})")


@dataclass(frozen=True)
class CutLink:
    """A node whose host does not answer a feeder.

    Attributes:
        generation: of the world that is fed.
        host: the feeder's, as nodes on it are known; empty for its address on the way to the
            driver.
    """

    generation: int
    node_id: int
    host: str = ""


def parse_cut_link(path: str, num_nodes: int) -> CutLink | None:
    """Return what a path says; `None` if it is none of these, or names no node of the cluster."""
    found = _CUT.fullmatch(path)
    if found is None or int(found[2]) >= num_nodes:
        return None
    return CutLink(int(found[1]), int(found[2]), found[3])


def fetch_cause(
    coordinator: str,
    token: str,
    trust: Trust | None = None,
    cut: CutLink | None = None,
    timeout_s: float = 5.0,
) -> str | None:
    """Return why the cluster has failed; empty if it has not; None if it has finished.

    Args:
        coordinator: the URL that agents connect to.
        trust: the certificate it must present, if the URL is `wss://`.
        cut: a link to report.
        timeout_s: of connecting, and of each wait for data.

    Raises:
        OSError: if the coordinator does not answer: the cluster was shut down, as a rule.
    """
    # Few feeders ever ask: the import would cost every one of them 50 ms at its first row.
    from http.client import HTTPConnection, HTTPException

    url, path = urlsplit(coordinator), CAUSE_PATH
    assert url.hostname
    assert url.port
    try:
        with closing(HTTPConnection(url.hostname, url.port, timeout=timeout_s)) as connection:
            if trust is not None:
                # HTTPSConnection would look for the host's name, which the certificate does not
                # carry.
                connection.sock = trust.connect(url.hostname, url.port, timeout_s)
            else:
                connection.connect()
            if cut is not None:
                host = cut.host or connection.sock.getsockname()[0]
                path = f"{CUT_PATH}{cut.generation}/{cut.node_id}/{host}"
            connection.request("GET", path, headers={"Authorization": bearer(token)})
            answer = connection.getresponse()
            cause = answer.read().decode()
    except HTTPException as error:
        raise OSError(f"the coordinator does not answer: {error!r}") from None
    if answer.status == FINISHED:
        return None
    if answer.status != HTTPStatus.OK:
        raise OSError(f"the coordinator does not answer: {answer.status} {answer.reason}")
    return cause
