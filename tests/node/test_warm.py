"""Agents that are kept: whom they fit, what has changed, and how a starter takes one."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import LazyLoader, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import msgspec
import pytest

from sparkdl.core.errors import ProtocolError
from sparkdl.core.options import Startup
from sparkdl.node import warm
from sparkdl.node.warm import Fit, WarmAgent, changed_since, listen, misfit, take
from tests.doubles.nodes import SOON_S

pytestmark = pytest.mark.skipif(not warm.CAN_KEEP, reason="agents are kept on Linux alone")

ENVIRONMENT = {"PYTHONPATH": "/a:/b", "SECRET": "s3cret", "OMP_NUM_THREADS": "1"}
FIT = Fit.of(ENVIRONMENT, "tensorflow", ["numpy"])


def test_an_agent_fits_a_launch_that_would_start_the_same() -> None:
    of_another_worker = {"PYTHON_WORKER_FACTORY_SECRET": "x", "PYTHON_WORKER_FACTORY_PORT": "7"}
    needs = Fit.of({**ENVIRONMENT, **of_another_worker}, "tensorflow", ["numpy"])
    assert misfit(FIT, needs) == ""


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": "0.1"}, "sparkdl's version is '0.1' now"),
        ({"executable": "/other/python"}, "the interpreter is '/other/python' now"),
        ({"folder": "/elsewhere"}, "the working directory is '/elsewhere' now"),
        ({"framework": "torch"}, "the framework is 'torch' now, and was 'tensorflow'"),
        ({"startup": Startup(preload=())}, r"preload is \(\) now, and was \('numpy',\)"),
        ({"environment": {**ENVIRONMENT, "PYTHONPATH": "/a:/b:/c"}}, "^sys.path is another one$"),
        ({"environment": {**ENVIRONMENT, "SECRET": "other", "NEW": ""}}, "variables: NEW, SECRET$"),
        ({"environment": {"PYTHONPATH": "/a:/b"}}, "variables: OMP_NUM_THREADS, SECRET$"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_what_differs_is_named_and_no_values_of_variables_are(
    change: dict[str, object], words: str
) -> None:
    problem = misfit(FIT, msgspec.structs.replace(FIT, **change))
    assert re.search(words, problem), problem
    assert "s3cret" not in problem


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """An imported module, whose file may be changed."""
    module = ModuleType("imported_for_a_test")
    path = tmp_path / "imported_for_a_test.py"
    path.write_text("")
    module.__file__ = str(path)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


def test_a_file_that_was_changed_after_its_import_is_found(module: ModuleType) -> None:
    assert module.__file__ is not None
    born_s = os.stat(module.__file__).st_ctime
    assert changed_since(born_s) == ""
    os.utime(module.__file__, (0, 0))  # an installer may date it back
    assert changed_since(born_s) in ("", module.__file__)  # within one tick of the file system
    assert changed_since(born_s - 0.01) == module.__file__
    os.unlink(module.__file__)
    assert changed_since(time.time()) == module.__file__


def test_a_module_in_a_zip_file_is_as_old_as_the_file(module: ModuleType, tmp_path: Path) -> None:
    archive = tmp_path / "shipped.zip"
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("inside/of_it.py", "")
    module.__file__ = f"{archive}/inside/of_it.py"
    assert changed_since(archive.stat().st_ctime) == ""
    assert changed_since(archive.stat().st_ctime - 0.01) == module.__file__


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
    assert changed_since(time.time() + 1) == ""
    assert changed_since(path.stat().st_ctime - 0.01) == str(path)


KEY, OWNER = "a key", 4711


@contextmanager
def kept(problem: str = "", key: str = KEY) -> Iterator[list[object]]:
    """An agent that is kept, as far as starters see it: this process, in a thread."""
    listener = listen(key, OWNER)
    assert listener is not None
    heard: list[object] = []

    def meet() -> None:
        with listener:
            try:
                sock, _address = listener.accept()
            except OSError:
                return
            with sock:
                try:
                    needs, fds = warm.receive_needs(sock, KEY)
                except ProtocolError as error:
                    heard.append(str(error))
                    return
                heard.append(needs)
                warm.answer(sock, problem)
                if not problem:
                    os.write(fds[1], os.read(fds[0], 100).upper())
                for fd in fds:
                    os.close(fd)

    thread = threading.Thread(target=meet)
    thread.start()
    yield heard
    with socket.socket(socket.AF_UNIX) as nobody:  # in case that nobody came
        nobody.connect_ex(listener.getsockname() if listener.fileno() >= 0 else "\0none")
    thread.join(SOON_S)
    assert not thread.is_alive()


def test_who_takes_an_agent_speaks_with_it_through_its_standard_input_and_output() -> None:
    with kept() as heard:
        agent = take(KEY, OWNER, FIT, 2)
        assert agent is not None
        assert agent.pid == os.getpid()
        agent.stdin.write(b"hello")
        agent.stdin.close()
        assert agent.stdout.read() == b"HELLO"
        agent.stdout.close()
    assert heard == [FIT]


def test_an_agent_that_is_of_no_use_is_passed_over() -> None:
    with kept("it is too old"), kept() as heard:
        agent = take(KEY, OWNER, FIT, 2)
        assert agent is not None
        agent.stdin.close()
        agent.stdout.close()
    assert heard == [FIT]


@pytest.mark.parametrize(("key", "owner"), [("another key", OWNER), (KEY, OWNER + 1), ("", OWNER)])
def test_agents_of_others_are_not_found(key: str, owner: int) -> None:
    with kept() as heard:
        assert take(key, owner, FIT, 2) is None
    assert FIT not in heard


def test_who_guesses_the_name_without_the_key_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with kept() as heard, monkeypatch.context() as patch:
        name = warm._name(KEY, OWNER, 0)
        patch.setattr(warm, "_name", lambda key, owner, place: name)
        assert take("wrong", OWNER, FIT, 2) is None
    assert heard == ["this agent belongs to another driver"]


def test_an_agent_that_was_taken_is_waited_for_and_killed_like_a_child() -> None:
    with (
        subprocess.Popen(["sleep", "60"]) as process,
        open(os.devnull, "wb") as stdin,
        open(os.devnull, "rb") as stdout,
    ):
        agent = WarmAgent(process.pid, os.pidfd_open(process.pid), stdin, stdout)
        assert agent.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            agent.wait(0.01)
        agent.kill()
        assert agent.wait(SOON_S) == agent.poll() == 255
        assert process.wait(SOON_S) == -signal.SIGKILL
        agent.kill()  # once it has ended, nothing


def test_answer_that_comes_before_all_has_been_sent_is_heard(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    send_fds = socket.send_fds

    def slowly(sock: socket.socket, *arguments: object) -> int:
        sent = send_fds(sock, *arguments)  # type: ignore[arg-type]
        met.wait(SOON_S)
        return sent

    met = threading.Event()
    listener = listen(KEY, OWNER)
    assert listener is not None

    def meet() -> None:
        sock, _address = listener.accept()
        with listener, sock:
            _needs, fds = warm.receive_needs(sock, KEY)
            warm.answer(sock, "")
            for fd in fds:
                os.close(fd)
        met.set()

    thread = threading.Thread(target=meet)
    thread.start()
    monkeypatch.setattr(socket, "send_fds", slowly)
    agent = take(KEY, OWNER, FIT, 2)
    thread.join(SOON_S)
    assert agent is not None
    agent.stdin.close()
    agent.stdout.close()
