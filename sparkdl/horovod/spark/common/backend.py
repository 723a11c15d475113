"""`SparkBackend`, by which programs for Horovod say how many processes there are.

https://github.com/horovod/horovod/blob/v0.28.1/horovod/spark/common/backend.py
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from sparkdl.core.errors import ConfigError
from sparkdl.core.namesakes import missing_name
from sparkdl.horovod.spark.runner import default_num_proc, refuse


class SparkBackend:
    """The processes of an estimator.

    Args:
        num_proc: how many; by default Spark's default parallelism.
        env: refused: Spark sets the variables of its executors.
        kwargs: further arguments of `sparkdl.horovod.spark.run`, without effect.

    Raises:
        ConfigError: for `env`, `use_mpi`, `nics` or `executable`.
    """

    def __init__(
        self, num_proc: int | None = None, env: Mapping[str, str] | None = None, **kwargs: Any
    ) -> None:
        if env:
            raise ConfigError(
                f"env={dict(env)!r}: must be empty. Set spark.executorEnv.NAME of the Spark session"
            )
        refuse(**{name: kwargs.get(name) for name in ("use_mpi", "nics", "executable")})
        self._num_proc = num_proc or default_num_proc()

    def num_processes(self) -> int:
        """Return how many processes there will be."""
        return self._num_proc


__getattr__ = partial(missing_name, __name__)
