"""What an agent is started with arrives whole, and nothing secret is to be seen."""

from __future__ import annotations

import io
import os
import stat
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from sparkdl.core.options import Feeding, Recovery, Roles
from sparkdl.core.settings import Settings
from sparkdl.core.spec import ClusterSpec, plan_nodes
from sparkdl.node.spec import AgentSpec, read_spec, start_agent, write_private

SPEC = ClusterSpec(
    "c",
    plan_nodes(4, Roles(ps=1, chief="master", evaluator=True)),
    "torch",
    "detached",
    num_gpus=2,
    settings=Settings(
        *(1.5, 2, Recovery(min_nodes=3, on_hang="fail"), Feeding(fed=False, disk_nbytes=0), 5.5, 6)
    ),
)
AGENT = AgentSpec("ws://[::1]:5", "tök-en", 2, SPEC, "task", "7.2", 4242, ("0", "1"))
PLAIN = AgentSpec("ws://h:1", "t", 0, ClusterSpec("c", plan_nodes(1)), "process")


@pytest.fixture
def echo(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Have agents be a program that writes what it gets to a file beside it."""
    program = tmp_path / "agent"
    program.write_text(
        f'#!{sys.executable}\nimport os, sys, pathlib\nhere = pathlib.Path("{tmp_path}")\n'
        '(here / "argv").write_text(" ".join(sys.argv[1:]))\n'
        '(here / "environ").write_text(str(dict(os.environ)))\n'
        '(here / "path").write_text(os.environ["PYTHONPATH"])\n'
        '(here / "session").write_text(str(os.getsid(0) == os.getpid()))\n'
        '(here / "stdin").write_bytes(sys.stdin.buffer.read())\n'
    )
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    return tmp_path


def started(spec: AgentSpec, payload: bytes, python_path: list[str]) -> subprocess.Popen[bytes]:
    process = start_agent(spec, payload, python_path, subprocess.DEVNULL)
    assert isinstance(process, subprocess.Popen)
    return process


@pytest.mark.parametrize("spec", [AGENT, PLAIN])
@pytest.mark.parametrize("payload", [b"", b"\x00pickle", bytes(1_000_000)], ids=len)
def test_a_spec_arrives_as_it_was_given(echo: Path, spec: AgentSpec, payload: bytes) -> None:
    with started(spec, payload, []):
        pass
    stream = io.BytesIO((echo / "stdin").read_bytes())
    assert read_spec(stream) == (spec, payload)
    assert stream.read() == b""


def test_agent_shows_no_secret_imports_as_its_starter_and_has_its_own_session(echo: Path) -> None:
    """The session keeps it out of the terminal's reach."""
    with started(AGENT, b"payload", ["", "/a", "/b c", ""]):
        pass
    assert (echo / "argv").read_text() == "-m sparkdl.node.agent"
    assert AGENT.token not in (echo / "environ").read_text()
    assert (echo / "path").read_text() == f"/a{os.pathsep}/b c"
    assert (echo / "session").read_text() == "True"


def test_an_agent_that_ends_at_once_is_waited_for(echo: Path) -> None:
    program = echo / "agent"
    program.write_text("#!/bin/sh\nexit 3\n")
    process = started(PLAIN, bytes(10_000_000), [])
    assert process.returncode == 3
    assert process.stdin is not None
    assert process.stdout is not None
    with suppress(BrokenPipeError):
        process.stdin.close()
    process.stdout.close()


def test_a_private_file_is_only_its_users_and_never_replaces_another(tmp_path: Path) -> None:
    path = tmp_path / "payload"
    write_private(path, b"secret")
    assert path.read_bytes() == b"secret"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(FileExistsError):
        write_private(path, b"other")
    assert path.read_bytes() == b"secret"
