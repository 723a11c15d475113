"""What a node's task checks on its executor before it starts an agent.

Runs in: feeder, driver

A task can only fail with text, so a problem is written into the exception as JSON behind a mark,
which the driver finds again in what Spark makes of it.
"""

from __future__ import annotations

import importlib.util
import json
import re
import socket
import sys
from dataclasses import dataclass

from sparkdl.core.errors import (
    ConfigError,
    FrameworkMissingError,
    LaunchError,
    SparkdlError,
)
from sparkdl.core.spec import ClusterSpec
from sparkdl.frameworks.registry import framework_named

PROBLEM_MARK = "sparkdl-problem:"
_CONNECT_TIMEOUT_S = 10.0
BOARD_MISSING = (
    "tensorboard=True needs the package tensorboard, and {python} has none. Install it in the "
    "Python environment of the executors (pip install tensorboard), or leave tensorboard out"
)
_KINDS: dict[str, type[SparkdlError]] = {
    kind.__name__: kind for kind in (ConfigError, FrameworkMissingError)
}


@dataclass(frozen=True)
class Problem:
    """A problem of a node's start: the name of the error to raise at the driver, and its text."""

    kind: str
    text: str

    def error(self) -> LaunchError:
        """Return the exception that carries this problem through Spark."""
        return LaunchError(PROBLEM_MARK + json.dumps([self.kind, self.text]))

    def at_driver(self) -> SparkdlError:
        """Return the exception to raise at the driver."""
        return _KINDS.get(self.kind, LaunchError)(self.text)


def parse_problem(text: str) -> Problem | None:
    """Find a problem in the text of a Spark error."""
    found = re.search(re.escape(PROBLEM_MARK) + r'(\["\w+", "(?:[^"\\]|\\.)*"\])', text)
    return Problem(*json.loads(found.group(1))) if found else None


def check_executor(spec: ClusterSpec, url: str) -> None:
    """Check that what was asked for is installed and the coordinator can be reached.

    Raises:
        LaunchError: with a `Problem`.
    """
    host = socket.gethostname()
    wanted = framework_named(spec.framework).distributions
    if wanted and not any(importlib.util.find_spec(name) for name in wanted):
        raise Problem(
            "FrameworkMissingError",
            f"framework={spec.framework!r} is not installed on executor {host}: "
            f"{sys.executable} finds no module {' or '.join(wanted)}. Install it there, or "
            "choose another framework ('plain' for none)",
        ).error()
    if spec.tensorboard is not None and importlib.util.find_spec("tensorboard") is None:
        text = BOARD_MISSING.format(python=f"{sys.executable} on executor {host}")
        raise Problem("FrameworkMissingError", text).error()
    target, _, port = url.rpartition("//")[2].rpartition(":")
    try:
        socket.create_connection((target.strip("[]"), int(port)), _CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise Problem(
            "ConfigError",
            f"executor {host} cannot reach the driver at {url}: {error}. Set "
            "SPARKDL_DRIVER_HOST to an address of the driver that executors can reach, and "
            "SPARKDL_DRIVER_PORT to a port or range that the firewall lets through",
        ).error() from None
