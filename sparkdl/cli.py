"""The command line, `sparkdl COMMAND`.

Runs in: driver
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from sparkdl.core.errors import NodeFailedError, SparkdlError
from sparkdl.core.texts import docs_page
from sparkdl.version import __version__

_INTERRUPTED = 130  # as shells have it


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="sparkdl",
        description="Deep learning on a Spark cluster.",
        epilog="Each command has --help.",
    )
    parser.add_argument("--version", action="version", version=f"sparkdl {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    text = "check a cluster before a training: what would fail, what is slow"
    _add_doctor(commands.add_parser("doctor", help=text))
    text = "train a small PyTorch model on two nodes of a local Spark, and score with it"
    commands.add_parser("demo", help=text, description=text).set_defaults(function=_demo)
    _add_run(commands.add_parser("run", help="run a program in several processes of this machine"))
    text = "show the record of a cluster in a browser"
    _add_dashboard(commands.add_parser("dashboard", help=text))
    options = parser.parse_args(argv)
    try:
        return int(options.function(options))
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:  # the reader has ended, like `| head`
        # Python flushes the stream once more at its end, which would raise again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (SparkdlError, ModuleNotFoundError) as error:
        fix = f". Run pip install {error.name}" if isinstance(error, ModuleNotFoundError) else ""
        print(f"sparkdl {options.command}: {error}{fix}", file=sys.stderr)
        return 2 if options.command == "doctor" else 1


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(function=_run)
    parser.description = (
        "Runs a Python program in several processes of this machine, which find each other by "
        "hvd.init() of sparkdl.horovod: as horovodrun does. On a cluster call "
        "sparkdl.horovod.spark.run in a program for spark-submit."
    )
    add = parser.add_argument
    add("-np", "--num-proc", dest="num_proc", type=int, default=1, help="how many processes")
    add("-H", "--hosts", help="this machine and its slots, like localhost:4")
    add("--min-np", "--min-num-proc", dest="min_num_proc", type=int,
        help="continue with at least this many if lost ones do not come back")  # fmt: skip
    add("--max-np", "--max-num-proc", dest="max_num_proc", type=int,
        help="accepted: there are never more than --num-proc")  # fmt: skip
    add("--reset-limit", type=int, help="how many restarts are allowed after failures")
    add("--elastic-timeout", type=float, help="seconds that a restart waits for lost processes")
    add("--checkpoint-dir", help="folder in which state.commit() saves, to continue later")
    add("--start-timeout", type=float, help="seconds within which all processes must start")
    add("--gloo", action="store_true", help="accepted: it is used anyway")
    add("--verbose", action="store_true", help="accepted: lines of all processes are printed")
    add("program", nargs=argparse.REMAINDER, metavar="python train.py …")


def _add_dashboard(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(function=_dashboard)
    parser.description = "Shows in a browser what a launch with Observe(record=FOLDER) has written."
    parser.add_argument("path", metavar="FOLDER", help="the folder of records, or one record in it")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at (%(default)s)")
    parser.add_argument("--port", type=int, default=8780, help="0 for any (%(default)s)")


def _dashboard(options: argparse.Namespace) -> int:
    from sparkdl.dashboard.server import show_records

    show_records(Path(options.path), options.host, options.port)
    return 0


def _add_doctor(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(function=_doctor)
    parser.description = (
        "Checks the driver and the executors as a launch would, and says what to change. See "
        f"{docs_page('deployment', 'sparkdl-doctor')}. The status is 0 if a launch would work, 1 "
        "if there are problems, 2 if the command line is wrong."
    )
    add = parser.add_argument
    add("--master", help="Spark's master URL; without it, only this machine is checked")
    add("--remote", help="URL of a Spark Connect server, like sc://host, instead of --master")
    add("--conf", action="append", default=[], metavar="KEY=VALUE", help="a Spark setting")
    add("--nodes", type=int, help="nodes of the training (default: one on each executor)")
    add("--framework", help="tensorflow, torch, jax or plain (default: all installed)")
    add("--num-gpus", type=int, help="GPUs for each node")
    add("--path", action="append", default=[], metavar="URL",
        help="a path or URL that nodes read or write; repeatable")  # fmt: skip
    add("--tls", action="store_true", default=None, help="encrypt, as Startup(tls=True)")
    add("--limit", type=float, default=120.0, metavar="SECONDS",
        help="time limit of Spark's answer, an import, a storage check (default 120)")  # fmt: skip
    add("--json", action="store_true", help="print only JSON")


def _demo(options: argparse.Namespace) -> int:
    from sparkdl.demo import demo

    print(demo())
    return 0


def _doctor(options: argparse.Namespace) -> int:
    from sparkdl.diagnosis.doctor import diagnose

    with _stdout_kept() as stdout:
        report = diagnose(options)
        print(report.to_json() if options.json else report, file=stdout, flush=True)
    return 0 if report.ok else 1


@contextmanager
def _stdout_kept() -> Iterator[TextIO]:
    """Redirect what others print to the error stream, the JVM's output as well."""
    sys.stdout.flush()
    with os.fdopen(os.dup(1), "w") as stdout:
        os.dup2(2, 1)
        try:
            yield stdout
        finally:
            os.dup2(stdout.fileno(), 1)


def _run(options: argparse.Namespace) -> int:
    from sparkdl.horovod.runner import program_of, run

    given = {name: value for name, value in vars(options).items() if value is not None}
    for name in ("command", "function", "gloo", "verbose"):
        del given[name]
    try:
        script, arguments = program_of(given.pop("program"))
        run(script.run, (arguments,), **given)
    except NodeFailedError as error:
        cause = error.root_cause
        is_seen = cause.kind in ("exception", "exit")  # its traceback has been printed
        print(f"sparkdl run: {cause.headline() if is_seen else error}", file=sys.stderr)
        return cause.exit_code or 1
    return 0
