"""Runs `sparkdl doctor`: starts Spark if it can, and makes the report."""

from __future__ import annotations

import argparse
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from sparkdl.core.errors import ConfigError
from sparkdl.diagnosis.doctor import Asked, examine
from sparkdl.diagnosis.report import Check, Report
from sparkdl.driver.slots.spark_errors import raised_in_task
from sparkdl.driver.threads import begin

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_START_S = 120.0
"""A master that does not answer is asked for ever on YARN, and for a minute elsewhere."""
_STOP_S = 30.0
_SETTINGS = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.log.level": "ERROR",
}
_START_ADVICE = {
    "master": "Look at the master's own page, at its address and port, and at its log; "
    "spark.driver.host has to be an address of this machine that the cluster reaches",
    "remote": "Look at the server's address and port, and at its log",
}


def diagnose(options: argparse.Namespace) -> Report:
    """Start Spark if a master is named, examine it, stop it.

    Raises:
        ConfigError: if an option cannot be.
    """
    asked = Asked(
        nodes=options.nodes,
        framework=options.framework,
        num_gpus=options.num_gpus,
        paths=tuple(options.path),
        tls=options.tls,
        limit_s=options.limit,
    )
    settings = dict(_setting(text) for text in options.conf)
    if options.master and options.remote:
        raise ConfigError("--master and --remote cannot both be given: leave one out")
    if not (options.master or options.remote):
        if settings:
            raise ConfigError(
                "--conf sets options of Spark, and no Spark is examined: add --master or --remote"
            )
        return examine(None, asked)
    found: list[SparkSession] = []
    began_s, where = time.monotonic(), options.master or options.remote
    descriptor, name = tempfile.mkstemp(prefix="sparkdl-doctor-", suffix=".log")
    os.close(descriptor)
    printed = Path(name)
    with printing_to(printed, 1, 2):  # without a master, the JVM's traces would bury the report
        problem = _within(_START_S, lambda: found.append(_start(options, settings)))
    if not found:
        finding = f"no session at {where}: {problem}{_last_error(printed)}"
        advice = _START_ADVICE["remote" if options.remote else "master"]
        return examine(None, asked, Check("Spark", "problem", finding, advice), began_s)
    # Kept only after a failure, whose finding names the file.
    printed.unlink()
    try:
        return examine(found[0], asked, began_s=began_s)
    finally:
        _within(_STOP_S, found[0].stop)


def _setting(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise ConfigError(f"--conf {text!r}: give KEY=VALUE")
    return name, value


def _start(options: argparse.Namespace, settings: dict[str, str]) -> SparkSession:
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.appName("sparkdl doctor")
    builder = builder.remote(options.remote) if options.remote else builder.master(options.master)
    for name, value in {**({} if options.remote else _SETTINGS), **settings}.items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


@contextmanager
def printing_to(file: Path, *numbers: int) -> Iterator[None]:
    """Redirect the output of started processes to a file; the JVM's stays there to its end.

    Args:
        numbers: the descriptors: 1 and 2 are the standard output and error.
    """
    # Descriptors and not `sys.stdout`, because the JVM writes past Python.
    kept = [(number, os.dup(number)) for number in numbers]
    try:
        with file.open("wb") as log:
            for number in numbers:
                os.dup2(log.fileno(), number)
        yield
    finally:
        for number, before in kept:
            os.dup2(before, number)
            os.close(before)


def _last_error(printed: Path) -> str:
    """Return what Spark has logged as an error last, and where the rest is."""
    errors = re.findall(r" ERROR (\S.*)", printed.read_text(errors="replace"))
    said = f"; Spark said: {errors[-1]}" if errors else ""
    return f"{said}; what it printed is in {printed}"


def _within(limit_s: float, does: Callable[[], object]) -> str:
    """Do it in a thread; return why it has not been done in time, or at all."""
    # In a daemon, because a call of py4j cannot be interrupted.
    done = begin(does, "sparkdl-doctor-spark")
    if not done.wait(limit_s):
        return f"nothing for {limit_s:g} s"
    try:
        done.result()
    except Exception as error:  # noqa: BLE001 (py4j's, Spark's, anybody's)
        return raised_in_task(error)
    return ""
