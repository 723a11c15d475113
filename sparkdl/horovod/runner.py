"""`horovod.run`: a function on several processes of this machine, without Spark.

Runs in: driver

https://github.com/horovod/horovod/blob/v0.28.1/horovod/runner/__init__.py
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sparkdl.core.errors import ConfigError
from sparkdl.horovod.spark import runner

__all__ = ["run"]

_ELASTIC = ("min_num_proc", "min_np", "max_num_proc", "max_np", "reset_limit", "elastic_timeout")
_REFUSED = {
    "hosts": "on a cluster use sparkdl.horovod.spark.run",
    "hostfile": "on a cluster use sparkdl.horovod.spark.run",
    "host_discovery_script": "Spark finds the hosts: use sparkdl.horovod.spark.run_elastic",
    "use_mpi": "sparkdl uses no MPI",
    "mpi_args": "sparkdl uses no MPI",
}


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    np: int | None = None,
    **options: Any,
) -> list[Any]:
    """Call `func(*args, **kwargs)` in `num_proc` processes; return the results by rank.

    Args:
        num_proc: how many, 1 by default; `np` is its older name.
        options: of `horovod.spark.run`; with `min_num_proc`, `reset_limit` or another one of
            `horovod.spark.run_elastic` it runs as that does.

    Raises:
        ConfigError: for hosts or MPI; or if it cannot work.
        NodeFailedError: if a process failed.
    """
    for name, advice in _REFUSED.items():
        if options.pop(name, None):
            raise ConfigError(f"horovod.run({name}=...): {advice}")
    is_elastic = any(options.get(name) is not None for name in _ELASTIC)
    call = runner.run_elastic if is_elastic else runner.run
    options = {"executor": "local", **options}
    return call(func, args, kwargs, num_proc or np or 1, **options)
