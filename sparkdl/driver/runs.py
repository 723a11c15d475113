"""The clusters that drivers of this user run on this machine, found and asked from another process.

Runs in: driver
"""

from __future__ import annotations

import getpass
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from sparkdl.core.errors import ConfigError, SparkdlError
from sparkdl.core.listing import listed
from sparkdl.driver.events import AnyEvent
from sparkdl.driver.history import History, folded
from sparkdl.driver.run_socket import PRESENT, STACKS, STACKS_S, SUFFIX, folder_of_user, is_own
from sparkdl.driver.show import table

_ANSWER_S = 5.0


class SilentDriverError(SparkdlError):
    """A driver has been asked and does not answer."""


class RunEndedError(SparkdlError):
    """The cluster, or its driver, has ended."""


@dataclass(frozen=True)
class Found:
    """A cluster's socket."""

    path: Path

    @property
    def cluster(self) -> str:
        """Its id."""
        return self.path.name.removesuffix(SUFFIX)

    def present(self) -> list[AnyEvent]:
        """Return events that describe the cluster as it is now.

        Raises:
            RunEndedError: if it has ended.
            SilentDriverError: if its driver does not answer.
        """
        return msgspec.json.decode(self._ask(PRESENT, _ANSWER_S), type=list[AnyEvent])

    def stacks(self) -> dict[str, str]:
        """Return the stacks of its nodes, see `Cluster.stacks`; raises as `present` does."""
        answer = self._ask(STACKS, STACKS_S + _ANSWER_S)
        return msgspec.json.decode(answer, type=dict[str, str])

    def _ask(self, what: bytes, limit_s: float) -> bytes:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(limit_s)
            try:
                sock.connect(str(self.path))
                sock.sendall(what)
                with sock.makefile("rb") as stream:
                    answer = stream.read()
            except (ConnectionRefusedError, FileNotFoundError):
                with suppress(OSError):  # its driver was killed and could not remove it
                    self.path.unlink()
                answer = b""
            except OSError as error:
                raise SilentDriverError(
                    f"the driver of cluster {self.cluster} does not answer: "
                    f"{str(error) or type(error).__name__}. It may be stopped (Ctrl-Z, SIGSTOP)"
                ) from error
        if not answer:
            raise RunEndedError(f"cluster {self.cluster} has ended")
        return answer


def found() -> list[Found]:
    """Return the existing sockets; their clusters may have ended."""
    folder = folder_of_user()
    with suppress(FileNotFoundError):
        if is_own(folder):
            return [Found(path) for path in sorted(folder.glob(f"*{SUFFIX}"))]
    return []


def chosen(cluster: str | None) -> Found:
    """Return the cluster whose id is or begins with `cluster`; without an id, the only one.

    Raises:
        ConfigError: if there is none, or several.
    """
    there = []
    for each in found():
        with suppress(RunEndedError, SilentDriverError):
            each.present()
            there.append(each)
    names = listed([each.cluster for each in there])
    if not there:
        raise ConfigError(nothing())
    fitting = [each for each in there if each.cluster.startswith(cluster or "")]
    if not fitting:
        raise ConfigError(f"there is no cluster {cluster}; choose one of {names}")
    if len(fitting) > 1:
        raise ConfigError(f"several clusters run: name one of {names}. `sparkdl runs` lists them")
    return fitting[0]


def nothing() -> str:
    """Return the message for a machine on which no cluster runs."""
    return (
        f"no cluster is running whose driver is on this machine ({socket.gethostname()}) and of "
        f"user {getpass.getuser()}. Ask where the driver runs, as its user"
    )


def runs_table() -> list[str]:
    """Return a line for each cluster that runs, below one of headings; empty if there is none."""
    lines = []
    for each in found():
        try:
            now = folded(each.present())
        except RunEndedError:
            continue
        except SilentDriverError:
            lines.append([each.cluster, "", "", "", "does not answer"])
            continue
        nodes = f"{len(now.launched.nodes)} {now.launched.framework}"
        elapsed = _duration(now.elapsed_s)
        cluster, status = now.launched.cluster, now.changed.status
        lines.append([cluster, _program(now), nodes, elapsed, status])
    return _aligned([["ID", "PROGRAM (PID)", "NODES", "ELAPSED", "STATE"], *lines]) if lines else []


def nodes_table(history: History) -> list[str]:
    """Return a line for each node of a cluster, below headings."""
    head = f"Cluster {history.launched.cluster}: {history.changed.status} ({_program(history)}"
    return [f"{head}, {_duration(history.elapsed_s)})", "", *_aligned(table(history))]


def _program(cluster: History) -> str:
    return f"{cluster.launched.program} ({cluster.launched.pid})"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _duration(seconds: float) -> str:
    days, rest = divmod(int(seconds), 86_400)
    clock = time.strftime("%H:%M:%S", time.gmtime(rest))
    return f"{days}d {clock}" if days else clock
