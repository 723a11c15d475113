"""`horovod.run`: a function on several processes of this machine, without Spark.

Runs in: driver

https://github.com/horovod/horovod/blob/v0.28.1/horovod/runner/__init__.py
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sparkdl.core.errors import ConfigError
from sparkdl.horovod.runner.hosts import check_hosts
from sparkdl.horovod.spark import runner

__all__ = ["run"]

_ELASTIC = ("min_num_proc", "min_np", "max_num_proc", "max_np", "reset_limit", "elastic_timeout")
_REFUSED = {
    "host_discovery_script": "Spark finds the hosts: use sparkdl.horovod.spark.run_elastic",
    "output_filename": "give stdout=, a stream that gets the lines of all processes",
    "use_mpi": "sparkdl uses no MPI",
    "mpi_args": "sparkdl uses no MPI",
}
_WITHOUT_EFFECT = {  # on one machine
    *("cooldown_range", "disable_cache", "network_interface", "slots"),
    *("ssh_identity_file", "ssh_port"),
}


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    *,
    np: int | None = None,
    hosts: str | None = None,
    hostfile: str | None = None,
    **options: Any,
) -> list[Any]:
    """Call `func(*args, **kwargs)` in `num_proc` processes; return the results by rank.

    Args:
        num_proc: how many, 1 by default; `np` is its older name.
        hosts, hostfile: this machine's names and their slots, like `localhost:2`.
        options: of `horovod.spark.run`; with `min_num_proc`, `reset_limit` or another one of
            `horovod.spark.run_elastic` it runs as that does. What Horovod has for SSH and for
            several hosts has no effect.

    Raises:
        ConfigError: for other machines or MPI; or if it cannot work.
        NodeFailedError: if a process failed; a RuntimeError, as in Horovod.
    """
    for name, advice in _REFUSED.items():
        if options.pop(name, None):
            raise ConfigError(f"horovod.run({name}=...): {advice}")
    options = {name: value for name, value in options.items() if name not in _WITHOUT_EFFECT}
    count = num_proc or np or 1
    check_hosts(hosts, hostfile, count)
    is_elastic = any(options.get(name) is not None for name in _ELASTIC)
    call = runner.run_elastic if is_elastic else runner.run
    return call(func, args, kwargs, count, **{"executor": "local", **options})
