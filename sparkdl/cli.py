"""The command line: `sparkdl demo`, `sparkdl run`, `sparkdl version`.

Runs in: driver
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
from importlib import metadata

from sparkdl.core.errors import NodeFailedError, SparkdlError
from sparkdl.version import __version__

_QUIET_TENSORFLOW = {"TF_CPP_MIN_LOG_LEVEL": "2", "TF_ENABLE_ONEDNN_OPTS": "0"}
DEMO_MASTER = "local-cluster[2,2,1024]"
_BESIDE = ("pyspark", "tensorflow", "tensorflow-cpu", "keras", "tf-keras", "torch", "lightning")
_INTERRUPTED = 130  # as shells have it


def main(argv: list[str] | None = None) -> int:
    """Run one command; return its exit status."""
    parser = argparse.ArgumentParser(
        prog="sparkdl",
        description="Deep learning on a Spark cluster.",
        epilog="Each command has --help.",
    )
    parser.add_argument("--version", action="version", version=f"sparkdl {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser(
        "demo",
        help="train and score a small model on a Spark cluster of this machine",
        add_help=False,
    )
    _add_run(commands.add_parser("run", help="run a program in several processes of this machine"))
    commands.add_parser("version", help="print the versions of sparkdl and of what it drives")
    options, rest = parser.parse_known_args(argv)
    if options.command == "demo":
        _demo(rest)
        return 0
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    return _run(options) if options.command == "run" else _version()


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Runs a Python program in several processes of this machine, which find each other by "
        "hvd.init() of sparkdl.horovod: as horovodrun does. On a cluster call "
        "sparkdl.horovod.spark.run in a program for spark-submit."
    )
    add = parser.add_argument
    add("-np", "--num-proc", dest="num_proc", type=int, default=1, help="how many processes")
    add("-H", "--hosts", help="this machine and its slots, like localhost:4")
    add("-hostfile", "--hostfile", help="a file with lines like: localhost slots=4")
    add("--min-np", "--min-num-proc", dest="min_num_proc", type=int,
        help="with how many to continue if lost ones do not come back")  # fmt: skip
    add("--max-np", "--max-num-proc", dest="max_num_proc", type=int,
        help="accepted: there are never more than --num-proc")  # fmt: skip
    add("--reset-limit", type=int, help="how often all may begin anew after a failure")
    add("--elastic-timeout", type=float, help="seconds that a restart waits for lost processes")
    add("--checkpoint-dir", help="folder where state.commit() is kept, to continue later")
    add("--start-timeout", type=float, help="seconds until all processes must be there")
    add("--gloo", action="store_true", help="accepted: it is used anyway")
    add("--verbose", action="store_true", help="accepted: lines of all processes are printed")
    add("program", nargs=argparse.REMAINDER, metavar="python train.py …")


def _run(options: argparse.Namespace) -> int:
    from sparkdl.horovod.runner import run_command

    given = {name: value for name, value in vars(options).items() if value is not None}
    for name in ("command", "gloo", "verbose"):
        del given[name]
    try:
        run_command(given.pop("program"), **given)
    except KeyboardInterrupt:
        return _INTERRUPTED
    except NodeFailedError as error:
        cause = error.root_cause
        is_seen = cause.kind in ("exception", "exit")  # its traceback has been printed
        print(f"sparkdl run: {cause.headline() if is_seen else error}", file=sys.stderr)
        return cause.exit_code or 1
    except SparkdlError as error:
        print(f"sparkdl run: {error}", file=sys.stderr)
        return 1
    return 0


def _version() -> int:
    print(f"sparkdl {__version__}, Python {platform.python_version()}")
    for name in _BESIDE:
        try:
            print(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    return 0


def _demo(argv: list[str]) -> None:
    from sparkdl import demo

    demo.parse(argv)  # mistakes and --help come before a cluster
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    for name, value in _QUIET_TENSORFLOW.items():
        os.environ.setdefault(name, value)
    from pyspark.sql import SparkSession

    (
        SparkSession.builder.master(DEMO_MASTER)
        .config("spark.ui.enabled", "false")
        .config("spark.python.unix.domain.socket.enabled", "true")
        .config("spark.log.level", "ERROR")
        .config("spark.ui.showConsoleProgress", "false")
        .getOrCreate()
    )
    demo.main(argv)
