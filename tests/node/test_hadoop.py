"""Hadoop's jars come onto the class path, once; who has no Hadoop, or a broken one, goes on."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from sparkdl.node.child import import_all
from sparkdl.node.resources import HadoopClasspath

JARS = '[ "$*" = "classpath --glob" ] && echo a.jar:b.jar'


@pytest.fixture
def hadoop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    for name in ("HADOOP_PREFIX", "HADOOP_HOME", "CLASSPATH", "TFOS_CLASSPATH_UPDATED"):
        monkeypatch.setenv(name, "")  # so that it is as before after the test
        monkeypatch.delenv(name)

    def install(script: str, variable: str = "HADOOP_HOME") -> None:
        command = tmp_path / "bin" / "hadoop"
        command.parent.mkdir(exist_ok=True)
        command.write_text(f"#!/bin/sh\n{script}\n")
        command.chmod(0o700)
        monkeypatch.setenv(variable, str(tmp_path))

    return install


@pytest.mark.parametrize("variable", ["HADOOP_PREFIX", "HADOOP_HOME"])
@pytest.mark.parametrize("before", ["", "mine.jar"])
def test_jars_are_appended_once(
    hadoop: Callable[..., None], monkeypatch: pytest.MonkeyPatch, variable: str, before: str
) -> None:
    hadoop(JARS, variable)
    if before:
        monkeypatch.setenv("CLASSPATH", before)
    jars = HadoopClasspath.begin()
    assert jars is not None
    jars.finish()
    assert os.environ["CLASSPATH"] == (f"{before}:" if before else "") + "a.jar:b.jar"
    assert HadoopClasspath.begin() is None


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("echo no JAVA_HOME >&2; exit 3", "status 3"),
        ("exec cat", "status 0, 0 characters"),  # its input is empty, not this process's
    ],
)
def test_a_failure_is_told_and_nothing_more(
    hadoop: Callable[..., None], caplog: pytest.LogCaptureFixture, script: str, words: str
) -> None:
    hadoop(script)
    jars = HadoopClasspath.begin()
    assert jars is not None
    with caplog.at_level(logging.WARNING):
        jars.finish()
    (record,) = caplog.records
    assert words in record.getMessage()
    assert "hdfs:// may not open" in record.getMessage()
    assert "bin/hadoop classpath --glob" in record.getMessage()
    assert "CLASSPATH" not in os.environ


def test_hanging_command_is_ended(
    hadoop: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    hadoop("exec tail -f /dev/null")
    jars = HadoopClasspath.begin()
    assert jars is not None
    jars.finish(timeout_s=0.1)
    assert "it took longer than 0.1 s" in caplog.text
    assert not psutil.Process().children()


def test_a_folder_without_the_command_is_told(
    monkeypatch: pytest.MonkeyPatch, hadoop: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HADOOP_HOME", "/no/such/folder")
    assert HadoopClasspath.begin() is None
    assert "/no/such/folder/bin/hadoop classpath --glob: " in caplog.text


def test_child_has_the_jars_before_its_world_begins(
    hadoop: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    hadoop(JARS)
    monkeypatch.setattr(gc, "freeze", lambda: None)
    import_all("plain", ())
    assert os.environ["CLASSPATH"] == "a.jar:b.jar"
