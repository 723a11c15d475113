from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from tests.doubles.leaks import RUN_VARIABLE, Police

ROOT = Path(__file__).parents[2]


@pytest.fixture
def police(run_name: str) -> Police:
    return Police(run_name, deadline_s=0.2)


@pytest.fixture
def cleanup() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def test_what_this_process_holds_is_caught_and_its_environment_restored(
    run_name: str, cleanup: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    police = Police(run_name, deadline_s=0.2, shared_memory=tmp_path)
    assert police.leaks() == []
    done = threading.Event()
    thread = threading.Thread(target=done.wait, name="forgotten")
    thread.start()
    cleanup.callback(thread.join)
    cleanup.callback(done.set)
    cleanup.enter_context((tmp_path / "left_open").open("w"))
    server = cleanup.enter_context(socket.create_server(("127.0.0.1", 0)))
    has_memory = hasattr(os, "memfd_create")  # Linux
    if has_memory:
        cleanup.callback(os.close, os.memfd_create("sparkdl-segment"))
    shared = tmp_path / "sparkdl-test"
    shared.touch()
    folder = Path(tempfile.mkdtemp(prefix="sparkdl-"))
    cleanup.callback(folder.rmdir)
    monkeypatch.setenv("FORGOTTEN", "1")
    monkeypatch.delenv(RUN_VARIABLE)
    monkeypatch.setenv("PATH", os.environ["PATH"] + ":/nowhere")
    found = police.leaks()
    (listening,) = (leak for leak in found if "socket listening on" in leak)
    assert str(server.getsockname()[1]) in listening
    memory = [leak for leak in found if "memfd:sparkdl-segment" in leak]
    assert len(memory) == has_memory
    assert sorted({*found} - {listening, *memory}) == [
        "environment variable: FORGOTTEN",
        "environment variable: PATH",
        f"environment variable: {RUN_VARIABLE} (removed)",
        f"file descriptor: {tmp_path / 'left_open'}",
        f"shared memory: {shared}",
        f"temporary folder: {folder}",
        "thread: forgotten",
    ]
    police.clean_up()
    assert not any("environment" in leak for leak in police.leaks())


def test_orphan_is_caught_by_the_mark_it_inherited(police: Police, cleanup: ExitStack) -> None:
    detach = (
        "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', 'input()'],"
        " stdout=subprocess.DEVNULL, start_new_session=True); print(p.pid)"
    )
    read_end, write_end = os.pipe()
    cleanup.callback(os.close, write_end)
    cleanup.callback(os.close, read_end)
    parent = subprocess.run(
        [sys.executable, "-c", detach],
        stdin=read_end,
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    orphan = psutil.Process(int(parent.stdout))
    cleanup.callback(police.clean_up)
    assert orphan not in psutil.Process().children(recursive=True)
    assert any(leak.startswith(f"process: {orphan.pid} ") for leak in police.leaks())
    police.clean_up()
    psutil.wait_procs([orphan], timeout=5)
    assert not orphan.is_running() or orphan.status() == psutil.STATUS_ZOMBIE


def test_test_that_leaks_fails(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEAK_DEADLINE_S", "0.2")
    conftest = (ROOT / "tests" / "conftest.py").read_text()
    pytester.makeconftest(conftest)
    pytester.makepyfile(
        """
        import os, threading

        done = threading.Event()

        def test_leaks():
            threading.Thread(target=done.wait, name="left").start()
            os.environ["LEFT"] = "1"

        def test_is_not_blamed_for_the_one_before():
            assert "LEFT" not in os.environ
            done.set()
        """
    )
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=2, errors=1)
    result.stdout.fnmatch_lines(["*ERROR at teardown of test_leaks*", "*thread: left"])
    result.stdout.fnmatch_lines(["*environment variable: LEFT"])
