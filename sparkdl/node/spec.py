"""An agent's start parameters: one JSON object and the pickled user code, on its standard input.

Runs in: driver, feeder, agent

Nothing secret stands on a command line or in the environment, which other users could read.
"""

from __future__ import annotations

import logging
import os
import struct
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import IO, BinaryIO, Literal

import msgspec

from sparkdl.control.tls import Tls
from sparkdl.core.errors import ProtocolError
from sparkdl.core.spec import ClusterSpec, NodeSpec

_log = logging.getLogger(__name__)

Owner = Literal["task", "process"]
_TAIL_NBYTES = 4000
_LENGTHS = struct.Struct("!IQ")


class AgentSpec(msgspec.Struct, frozen=True):
    """Everything an agent needs to know.

    Attributes:
        url, token: the coordinator's.
        tls: what the cluster's servers show; `None` without TLS.
        task: which task of Spark this is, see `Hello.task`.
        owner: what starts it and holds the other end of its standard input; it ends with that.
        executor_pid: ends the agent of a task too, and alone once it has been detached from that;
            `None` if it could not be found, so that the driver alone ends the agent then.
        gpus: addresses that Spark assigned; `None` where Spark assigns none.
        spark_files: the folder of `SparkContext.addFile` on the executor; empty outside of Spark.
    """

    url: str
    token: str
    node_id: int
    spec: ClusterSpec
    owner: Owner
    task: str = ""
    executor_pid: int | None = None
    gpus: tuple[str, ...] | None = None
    tls: Tls | None = None
    spark_files: str = ""

    @property
    def node(self) -> NodeSpec:
        return self.spec.nodes[self.node_id]

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.url.rpartition("//")[2].rpartition(":")
        return host.strip("[]"), int(port)


class StatusLine(msgspec.Struct, frozen=True):
    """A line printed by an agent for its parent process.

    Attributes:
        work_dir: the folder of its files, reported first: a killed agent cannot remove them.
        is_detached: it continues without its task.
        error: why it ended, in words; empty if it has not.
        kind: the name of the class of the error.
    """

    is_detached: bool = False
    error: str = ""
    kind: str = ""
    work_dir: str = ""


def start_agent(
    agent_spec: AgentSpec, payload: bytes, python_path: list[str], stderr: int
) -> subprocess.Popen[bytes]:
    """Start an agent with this interpreter. Its standard input stays open in `stdin`."""
    path = os.pathsep.join(path for path in python_path if path)
    # TensorFlow logs its INFO otherwise, of no use to anyone who trains.
    environment = {"TF_CPP_MIN_LOG_LEVEL": "1", **os.environ, "PYTHONPATH": path}
    process = subprocess.Popen(
        [sys.executable, "-m", "sparkdl.node.agent"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        env=environment,
        # Ctrl-C and other signals for its starter's group do not reach the agent.
        start_new_session=True,
    )
    assert process.stdin is not None
    body = msgspec.json.encode(agent_spec)
    try:
        process.stdin.write(_LENGTHS.pack(len(body), len(payload)) + body + payload)
        process.stdin.flush()
    except BrokenPipeError:
        # The agent has ended before it read all. Its status and standard error give the reason.
        with suppress(BrokenPipeError):
            process.stdin.close()
        process.wait()
    return process


def print_status(line: StatusLine) -> None:
    """Report to the process that started this agent; it may have stopped listening."""
    try:
        with open(1, "wb", buffering=0, closefd=False) as stream:
            stream.write(msgspec.json.encode(line) + b"\n")
    except OSError:
        _log.debug("This agent's standard output is closed at its other end")


def tail_of(stderr: IO[bytes]) -> str:
    stderr.seek(max(0, os.fstat(stderr.fileno()).st_size - _TAIL_NBYTES))
    return stderr.read().decode(errors="replace").strip()


def read_spec(stream: BinaryIO) -> tuple[AgentSpec, bytes]:
    """Read what `start_agent` wrote, and no byte more."""
    lengths = _LENGTHS.unpack(_read(stream, _LENGTHS.size))
    body, payload = _read(stream, lengths[0]), _read(stream, lengths[1])
    return msgspec.json.decode(body, type=AgentSpec), payload


def _read(stream: BinaryIO, nbytes: int) -> bytes:
    data = stream.read(nbytes)
    if len(data) < nbytes:
        raise ProtocolError("an agent was started without an AgentSpec on its standard input")
    return data


def write_private(path: Path, data: bytes) -> None:
    # O_EXCL, so that it never writes into a file that another process has put there.
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(fd, "wb") as file:
        file.write(data)
