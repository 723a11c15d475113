"""`horovod.run`: a function on several processes of this machine, without Spark.

Runs in: driver

https://github.com/horovod/horovod/blob/v0.28.1/horovod/runner/__init__.py
"""

from __future__ import annotations

import logging
import os
import re
import runpy
import shutil
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparkdl.core.errors import ConfigError
from sparkdl.horovod.spark import runner

__all__ = ["run"]


def run(  # noqa: PLR0913 (Horovod's options)
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = 1,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    slots: int | None = None,
    reset_limit: int | None = None,
    cooldown_range: Sequence[int] | None = None,
    hosts: str | None = None,
    hostfile: str | None = None,
    host_discovery_script: str | None = None,
    start_timeout: float | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | None = None,
    disable_cache: bool | None = None,
    output_filename: str | None = None,
    verbose: int | None = None,
    use_gloo: bool | None = None,
    use_mpi: bool | None = None,
    mpi_args: str | None = None,
    network_interface: str | None = None,
    network_interfaces: str | None = None,
    executable: str | None = None,
    np: int | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
    **options: Any,
) -> list[Any]:
    """Call `func(*args, **kwargs)` in `num_proc` processes; return the results by rank.

    Args:
        num_proc: how many; `np` is its older name.
        min_num_proc, max_num_proc, reset_limit: of `horovod.spark.run_elastic`; with one of them,
            or `elastic_timeout`, it runs as that does. `min_np`, `max_np` are their older names.
        hosts, hostfile: this machine's names and their slots, like `localhost:2`.
        slots, cooldown_range, ssh_port, ssh_identity_file, disable_cache, network_interface,
            network_interfaces, mpi_args: accepted; on one machine without MPI they have no effect.
        start_timeout, verbose, use_gloo: see `horovod.spark.run`.
        options: further ones of `horovod.spark.run`.

    Raises:
        ConfigError: for other machines, MPI, `output_filename` or `executable`; or if it cannot
            work.
        NodeFailedError: if a process failed; a RuntimeError, as in Horovod.
    """
    runner.refuse(
        host_discovery_script=host_discovery_script,
        output_filename=output_filename,
        use_mpi=use_mpi,
        executable=executable,
    )
    count = np or num_proc or 1
    check_hosts(hosts, hostfile, count)
    elastic = {
        "min_num_proc": min_num_proc or min_np,
        "max_num_proc": max_num_proc or max_np,
        "reset_limit": reset_limit,
        "elastic_timeout": options.pop("elastic_timeout", None),
    }
    options = {"executor": "local", "start_timeout": start_timeout, "verbose": verbose, **options}
    if all(value is None for value in elastic.values()):
        return runner.run(func, args, kwargs, count, **options)
    return runner.run_elastic(func, args, kwargs, count, **elastic, **options)


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
        """Read a command line.

        Raises:
            ConfigError: if it does not start a Python program, or one that is not there.
        """
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


def run_command(words: Sequence[str], num_proc: int, **options: Any) -> None:
    """Run a command line in `num_proc` processes, whose lines are printed.

    Args:
        options: of `horovod.run`.

    Raises:
        ConfigError: if it cannot work.
        NodeFailedError: if a process failed.
    """
    run(Command.parse(words), num_proc=num_proc, **options)


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


_IN_LIST = re.compile(r"([\w.-]+|\[[0-9a-fA-F:]+\]):(\d+)")
_IN_FILE = re.compile(r"(\S+)\s+slots\s*=\s*(\d+)")


def check_hosts(hosts: str | None, hostfile: str | None, num_proc: int) -> None:
    """Check that so many processes can run here, as far as anything is said of hosts.

    Args:
        hosts: like `localhost:4`.
        hostfile: path of a file with lines like `localhost slots=4`.

    Raises:
        ConfigError: if a host is another machine, has too few slots or is not written so.
    """
    if hosts and hostfile:
        raise ConfigError(f"hosts={hosts!r} and hostfile={hostfile!r}: give only one of them")
    if not (hosts or hostfile):
        return
    named = _listed(hosts) if hosts else _read(str(hostfile))
    for host, _ in named:
        if not is_here(host):
            raise ConfigError(
                f"{'hosts' if hosts else 'hostfile'}: {host} is not this machine, and processes "
                "are started on others by Spark: use sparkdl.horovod.spark.run"
            )
    slots = sum(count for _, count in named)
    if num_proc > slots:
        raise ConfigError(
            f"Requested more processes ({num_proc}) than there are available slots ({slots}); "
            "raise the slots of the hosts, or ask for fewer"
        )


def is_here(host: str) -> bool:
    """Whether a name or an address is this machine's."""
    if host in ("localhost", socket.gethostname()):
        return True
    try:
        found = socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)
    except OSError:  # an unknown name
        return False
    # Only an address of this machine can be bound.
    for family, kind, _, _, address in found:
        with suppress(OSError), socket.socket(family, kind) as probe:
            probe.bind(address)
            return True
    return False


def _listed(hosts: str) -> Sequence[tuple[str, int]]:
    found = [_IN_LIST.fullmatch(part.strip()) for part in hosts.split(",")]
    if not all(found):
        raise ConfigError(f"hosts={hosts!r}: write it like localhost:2, or a:2,b:4")
    return [(match[1], int(match[2])) for match in found if match]


def _read(path: str) -> Sequence[tuple[str, int]]:
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(
            f"hostfile={path!r} cannot be read: {error}. Give a file with lines like `localhost "
            "slots=2`"
        ) from error
    lines = [line.partition("#")[0].strip() for line in lines]
    found = [(line, _IN_FILE.match(line)) for line in lines if line]
    for line, match in found:
        if not match:
            raise ConfigError(f"hostfile={path!r}: {line!r} must be written like `a slots=2`")
    return [(match[1], int(match[2])) for _, match in found if match]
