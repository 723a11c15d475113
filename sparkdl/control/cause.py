"""Why no node answers: a feeder asks the coordinator, because nodes that have ended cannot say.

Runs in: feeder, driver. The driver answers.

An HTTP `GET` with the token. The nodes of a cluster that has failed or finished end after a few
seconds, and a Spark task may come later.
"""

from __future__ import annotations

from http import HTTPStatus
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

from sparkdl.control.auth import bearer

CAUSE_PATH = "/cause"
FINISHED = HTTPStatus.GONE
"""The status of the answer once every `map_fun` has returned."""
_WAIT_S = 5.0


def fetch_cause(coordinator: str, token: str) -> str | None:
    """Return why the cluster has failed; empty if it has not; None if it has finished.

    Args:
        coordinator: the URL that agents connect to.

    Raises:
        OSError: if the coordinator does not answer: the cluster was shut down, as a rule.
    """
    url = coordinator.replace("ws://", "http://", 1) + CAUSE_PATH
    request = Request(url, headers={"Authorization": bearer(token)})
    try:
        with build_opener(ProxyHandler({})).open(request, timeout=_WAIT_S) as answer:
            cause: str = answer.read().decode()
            return cause
    except HTTPError as error:
        with error:
            if error.code == FINISHED:
                return None
        raise
