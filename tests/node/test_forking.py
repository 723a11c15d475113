"""Which processes share a zygote, what has changed since it imported, and when it must not fork."""

from __future__ import annotations

import errno
import math
import os
import socket
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import LazyLoader, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO, cast

import msgspec
import pytest

from sparkdl.frameworks.framework import Framework
from sparkdl.node import forking, zygote
from sparkdl.node.forking import (
    CAN_FORK,
    MAX_FDS,
    MAX_NBYTES,
    Exited,
    ForkedAgent,
    Place,
    Plan,
    Request,
    Unsafe,
    decode_answer,
)
from sparkdl.node.zygote import ImportedFiles, _Connection

pytestmark = pytest.mark.skipif(not CAN_FORK, reason="zygotes are for Linux")

ENVIRONMENT = {"PYTHONPATH": "/a:/b", "SECRET": "s3cret", "OMP_NUM_THREADS": "1"}
SAME: dict[str, Any] = {
    "key": "a key",
    "owner_pid": 4711,
    "environment": ENVIRONMENT,
    "framework": "tensorflow",
    "preload": ["numpy"],
}


def name(**change: Any) -> str:
    place = Place.of(**{**SAME, **change})
    assert place is not None
    return place.name


def test_processes_that_would_be_the_same_share_a_zygote() -> None:
    of_another_worker = {"PYTHON_WORKER_FACTORY_SECRET": "x", "PYTHON_WORKER_FACTORY_PORT": "7"}
    assert name(environment={**ENVIRONMENT, **of_another_worker}) == name()
    assert name(environment=dict(reversed(ENVIRONMENT.items()))) == name()


@pytest.mark.parametrize(
    "change",
    [
        {"key": "another driver's"},
        {"owner_pid": 4712},
        {"environment": {**ENVIRONMENT, "PYTHONPATH": "/a:/b:/c"}},
        {"environment": {**ENVIRONMENT, "NEW": ""}},
        {"framework": "torch"},
        {"preload": []},
    ],
    ids=lambda change: ",".join(change),
)
def test_processes_that_differ_have_another_zygote(change: dict[str, Any]) -> None:
    assert name(**change) != name()


def test_another_interpreter_folder_or_version_has_another_zygote(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    names = {name()}
    monkeypatch.setattr(forking, "__version__", "0.1")
    names.add(name())
    monkeypatch.setattr(sys, "executable", "/other/python")
    names.add(name())
    monkeypatch.chdir(tmp_path)
    names.add(name())
    assert len(names) == 4


@pytest.mark.parametrize("change", [{"key": ""}, {"owner_pid": None}], ids=["key", "executor"])
def test_without_a_key_or_an_executor_there_is_no_zygote(change: dict[str, Any]) -> None:
    assert Place.of(**{**SAME, **change}) is None


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """An imported module, whose file may be changed."""
    module = ModuleType("imported_for_a_test")
    path = tmp_path / "imported_for_a_test.py"
    path.write_text("")
    module.__file__ = str(path)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


def imported(began_s: float = math.inf) -> ImportedFiles:
    files = ImportedFiles()
    files.add(began_s)
    return files


def test_a_file_that_was_changed_after_its_import_is_found(module: ModuleType) -> None:
    path = Path(str(module.__file__))
    files = imported()
    assert files.changed() == ""
    os.utime(path, (0, 0))  # an installer may date it back
    assert files.changed() == str(path)
    files = imported()
    other = path.with_suffix(".new")
    other.write_text("")
    os.utime(other, (0, 0))
    other.rename(path)
    assert files.changed() == str(path)
    files = imported()
    path.unlink()
    assert files.changed() == str(path)


def test_another_link_to_a_file_is_no_change(module: ModuleType, tmp_path: Path) -> None:
    path = Path(str(module.__file__))
    files, before = imported(), path.stat()
    (tmp_path / "copy.py").hardlink_to(path)
    assert path.stat().st_nlink > before.st_nlink
    assert files.changed() == ""


def test_a_file_that_was_changed_during_its_import_is_found(module: ModuleType) -> None:
    path = str(module.__file__)
    os.utime(path, (0, 0))
    assert imported(os.stat(path).st_ctime - 0.01).changed() == path


def test_a_module_in_a_zip_file_changes_with_the_file(module: ModuleType, tmp_path: Path) -> None:
    archive = tmp_path / "shipped.zip"
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("inside/of_it.py", "")
    module.__file__ = f"{archive}/inside/of_it.py"
    files = imported()
    assert files.changed() == ""
    with zipfile.ZipFile(archive, "a") as file:
        file.writestr("inside/another.py", "")
    assert files.changed() == module.__file__


def test_a_module_that_is_to_run_later_is_looked_at_and_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "later.py"
    path.write_text("raise AssertionError('it has run')")
    spec = spec_from_file_location("later", path)
    assert spec is not None
    assert spec.loader is not None
    spec.loader = LazyLoader(spec.loader)
    later = module_from_spec(spec)
    spec.loader.exec_module(later)
    monkeypatch.setitem(sys.modules, "later", later)
    files = imported()
    assert files.changed() == ""
    path.unlink()
    assert files.changed() == str(path)


@pytest.mark.parametrize(
    ("program", "problem"),
    [
        ("", ""),
        ("import numpy; numpy.ones((500, 500)) @ numpy.ones((500, 500))", ""),
        ("import pyarrow; pyarrow.array([1])", ""),
        (
            "import threading; threading.Thread(target=input, daemon=True).start()",
            "the imports have started threads: python",
        ),
        (
            "zygote._DEVICES = ('/dev/zero',); device = open('/dev/zero')",
            "the imports have opened a GPU: /dev/zero",
        ),
    ],
    ids=["nothing", "OpenBLAS", "Arrow", "a thread", "a device"],
)
def test_a_fork_is_safe_without_other_threads_and_devices(program: str, problem: str) -> None:
    program = f"from sparkdl.node import zygote; {program}\nprint(zygote._what_is_unsafe())"
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline().strip() == problem
        process.kill()


@pytest.fixture
def forked() -> Iterator[tuple[ForkedAgent, subprocess.Popen[bytes], socket.socket]]:
    """An agent that waits, its process, and the zygote's end of the connection."""
    ours, zygotes = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.settimeout(10)
    command = [sys.executable, "-c", "input()"]
    with (
        zygotes,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        stdin, stdout = cast("BinaryIO", process.stdin), cast("BinaryIO", process.stdout)
        yield ForkedAgent(process.pid, ours, stdin, stdout), process, zygotes
        process.kill()


def test_threads_that_wait_for_an_agent_get_the_status_that_comes_after_its_end(
    forked: tuple[ForkedAgent, subprocess.Popen[bytes], socket.socket],
) -> None:
    agent, process, zygotes = forked
    assert agent.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        agent.wait(0.01)
    with ThreadPoolExecutor(8) as pool:
        waiting = [pool.submit(agent.wait, 30.0) for _ in range(8)]
        agent.kill()
        process.wait()  # the zygote has reaped it, and sends its status only now
        zygotes.send(msgspec.json.encode(Exited(-9)))
        assert {each.result() for each in waiting} == {-9}
    agent.kill()
    assert agent.poll() == -9
    assert agent._socket.fileno() == -1
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(agent._pidfd)


def test_zygote_that_cannot_fork_says_so_and_lives_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> int:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(zygote, "_fork", fail)
    agents, zygotes = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    gone, of_gone = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    gone.close()
    one = zygote._Zygote(Plan("plain", (), os.getpid(), -1, -1), zygotes, Framework(), {})
    with agents, zygotes, of_gone, open(os.devnull) as file:
        for sock in (of_gone, zygotes):
            one._fork(_Connection(sock), Request("child"), [file.fileno()] * MAX_FDS)
        assert decode_answer(agents.recv(MAX_NBYTES)) == Unsafe(
            "it cannot be forked: [Errno 11] Resource temporarily unavailable"
        )
