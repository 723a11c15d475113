"""An executor's daemon imports TensorFlow once, and its Python workers have it from their start."""

from __future__ import annotations

import socket
import struct
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(300)]

_DEADLINE_S = 240.0


def has_tensorflow(pid: int) -> bool:
    return "_pywrap_tensorflow" in Path(f"/proc/{pid}/maps").read_text(encoding="utf-8")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_worker_has_tensorflow_before_its_first_task() -> None:
    command = [sys.executable, "-m", "sparkdl.ml.daemon", "pyspark.worker"]
    daemon = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert daemon.stdin is not None
    assert daemon.stdout is not None
    with daemon, daemon.stdin, daemon.stdout:
        try:
            (port,) = struct.unpack(">i", daemon.stdout.read(4))  # nothing is printed before
            assert has_tensorflow(daemon.pid)
            with socket.create_connection(("127.0.0.1", port), _DEADLINE_S) as worker:
                (pid,) = struct.unpack(">i", worker.recv(4, socket.MSG_WAITALL))
                assert psutil.Process(pid).ppid() == daemon.pid
                assert has_tensorflow(pid)
        finally:
            daemon.stdin.close()  # Spark's word for the end
            daemon.wait(_DEADLINE_S)
