"""`horovod.run`: a function on several processes of this machine, without Spark.

Runs in: driver

https://github.com/horovod/horovod/blob/v0.28.1/horovod/runner/__init__.py
"""

from __future__ import annotations

import logging
import os
import runpy
import shutil
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparkdl.core.errors import ConfigError
from sparkdl.horovod.spark import runner

__all__ = ["run"]


_ELASTIC = ("min_num_proc", "max_num_proc", "min_np", "max_np", "reset_limit", "elastic_timeout")
_IGNORED = (
    *("slots", "cooldown_range", "ssh_port", "ssh_identity_file", "disable_cache", "use_gloo"),
    *("mpi_args", "network_interface", "network_interfaces"),
)
_REFUSED = ("host_discovery_script", "output_filename", "use_mpi", "executable")


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = 1,
    *,
    np: int | None = None,
    hosts: str | None = None,
    **options: Any,
) -> list[Any]:
    """Call `func(*args, **kwargs)` in `num_proc` processes; return the results by rank.

    Args:
        num_proc: how many; `np` is its older name.
        hosts: this machine's names, like `localhost:2`.
        options: of `horovod.spark.run`; with `min_num_proc`, `max_num_proc`, `reset_limit` or
            `elastic_timeout` of `horovod.spark.run_elastic`. Those of Horovod's that only other
            machines or MPI need are accepted without effect.

    Raises:
        ConfigError: for other machines, MPI, `output_filename` or `executable`; or if it cannot
            work.
        NodeFailedError: if a process failed; a RuntimeError, as in Horovod.
    """
    runner.refuse(**{name: options.pop(name, None) for name in _REFUSED})
    if hostfile := options.pop("hostfile", None):
        raise ConfigError(
            f"hostfile={hostfile!r}: processes are started on this machine alone. Leave it out, "
            "or use sparkdl.horovod.spark.run"
        )
    count = np or num_proc or 1
    check_hosts(hosts)
    options = {"executor": "local", **options}
    options = {name: value for name, value in options.items() if name not in _IGNORED}
    if all(options.get(name) is None for name in _ELASTIC):
        plain = {name: value for name, value in options.items() if name not in _ELASTIC}
        return runner.run(func, args, kwargs, count, **plain)
    return runner.run_elastic(func, args, kwargs, count, **options)


_log = logging.getLogger(__name__)
_SHAPE = "write `python train.py …`, `python -m package.train …` or `train.py …`"


@dataclass(frozen=True)
class Command:
    """A program and its arguments. Called in each process, it runs as `__main__`.

    Attributes:
        target: path of a script, or name of a module.
        arguments: of its command line.
    """

    target: str
    arguments: tuple[str, ...]
    is_module: bool = False

    @classmethod
    def parse(cls, words: Sequence[str]) -> Command:
        """Read a command line."""
        rest = list(words)
        is_started = bool(rest) and _is_python(rest[0])
        if is_started:
            _check_interpreter(rest.pop(0))
            if rest[:1] == ["-u"]:  # lines come as they are printed anyway
                rest.pop(0)
            if rest[:1] == ["-m"] and len(rest) > 1:
                return cls(rest[1], tuple(rest[2:]), is_module=True)
        if not rest or rest[0].startswith("-") or not (is_started or rest[0].endswith(".py")):
            raise ConfigError(f"{' '.join(words)!r} does not start a Python program: {_SHAPE}")
        if not Path(rest[0]).is_file():
            raise ConfigError(
                f"there is no file {rest[0]} in {Path.cwd()}: give a path from there, or a whole "
                "one"
            )
        return cls(rest[0], tuple(rest[1:]))

    def __call__(self) -> None:
        """Run it here."""
        sys.argv = [self.target, *self.arguments]
        # As Python does: of `-m` the working directory, of a script its own folder.
        found_in = os.getcwd() if self.is_module else str(Path(self.target).absolute().parent)
        sys.path.insert(0, found_in)
        try:
            if self.is_module:
                runpy.run_module(self.target, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(self.target, run_name="__main__")
        except SystemExit as stop:
            # A program may end by `sys.exit(0)`, which is no failure.
            if stop.code not in (None, 0):
                raise


def _is_python(word: str) -> bool:
    return Path(word).name.rstrip("0123456789.") == "python"


def _check_interpreter(word: str) -> None:
    named = shutil.which(word)
    if named is None or Path(named).absolute().parent != Path(sys.executable).absolute().parent:
        _log.warning(
            "%s is another Python than this program's: the processes run under %s. Start the "
            "program with that Python to use it",
            word,
            sys.executable,
        )


def check_hosts(hosts: str | None) -> None:
    """Raise `ConfigError` if one of `localhost:4` is another machine, or not written so."""
    own = ("localhost", "127.0.0.1", "[::1]", socket.gethostname())
    for part in hosts.split(",") if hosts else ():
        host, _, slots = part.strip().rpartition(":")
        if not slots.isdigit():
            raise ConfigError(f"hosts={hosts!r}: write it like localhost:2, or a:2,b:4")
        if host not in own:
            raise ConfigError(
                f"hosts={hosts!r}: {host} is not a name of this machine, and processes are "
                "started on others by Spark: write localhost, or use sparkdl.horovod.spark.run"
            )
