"""`horovod.run`: a function on several processes of this machine, without Spark.

Runs in: driver

https://github.com/horovod/horovod/blob/v0.28.1/horovod/runner/__init__.py
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sparkdl.core.errors import ConfigError
from sparkdl.horovod.spark import runner
from sparkdl.torch_program import Script, script_of

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
            f"hostfile={hostfile!r}: processes are started only on this machine. Leave it out, "
            "or use sparkdl.horovod.spark.run"
        )
    count = np or num_proc or 1
    check_hosts(hosts)
    options = {"executor": "local", **options}
    options = {name: value for name, value in options.items() if name not in _IGNORED}
    if any(options.get(name) is not None for name in _ELASTIC):
        return runner.run_elastic(func, args, kwargs, count, **options)
    options = {name: value for name, value in options.items() if name not in _ELASTIC}
    return runner.run(func, args, kwargs, count, **options)


def program_of(words: Sequence[str]) -> tuple[Script, tuple[str, ...]]:
    """Return the program of a command line like `python train.py --lr 0.1`, and its arguments."""
    rest = list(words)
    is_started = bool(rest) and Path(rest[0]).name.rstrip("0123456789.") == "python"
    if is_started:  # with -u or without: lines come as they are printed
        rest = rest[2:] if rest[1:2] == ["-u"] else rest[1:]
    if not rest or rest[0].startswith("-") or not (is_started or rest[0].endswith(".py")):
        raise ConfigError(
            f"{' '.join(words)!r} does not start a Python program: write `python train.py …` or "
            "`train.py …`"
        )
    return script_of(rest[0]), tuple(rest[1:])


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
