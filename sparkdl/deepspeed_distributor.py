"""`DeepspeedTorchDistributor`: pyspark's, by sparkdl's `TorchDistributor`.

Runs in: driver

https://spark.apache.org/docs/latest/api/python/reference/api/pyspark.ml.deepspeed.deepspeed_distributor.DeepspeedTorchDistributor.html
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from sparkdl.core.errors import ConfigError
from sparkdl.torch_distributor import TorchDistributor
from sparkdl.torch_program import Program, Returned


class DeepspeedTorchDistributor(TorchDistributor):
    """Runs a function or program that trains with DeepSpeed in several processes.

    A program finds `--deepspeed`, and with a configuration `--deepspeed_config FILE`, behind its
    own arguments, a function in `sys.argv`; the file is there on each node. DeepSpeed has to be
    installed where the processes run, not on the driver.

    Args:
        numGpus: processes on each node, each with one GPU if `useGpu`.
        nnodes: how many nodes; sparkdl starts `numGpus * nnodes` processes, wherever Spark has
            room for them.
        localMode: whether they run on this machine, not on Spark's executors.
        useGpu: whether each process has a GPU; without, it sees none.
        deepspeedConfig: DeepSpeed's configuration as a dict, or the path of its JSON file on this
            machine.
        options: of `TorchDistributor`, by keyword: `feed`, `max_restarts`, `checkpoint_dir`, …

    Raises:
        ConfigError: a ValueError, if a number is below 1, or the configuration is no JSON object,
            or cannot be read; and what `TorchDistributor` raises.
    """

    def __init__(
        self,
        numGpus: int = 1,  # noqa: N803 (pyspark's names)
        nnodes: int = 1,
        localMode: bool = True,  # noqa: N803
        useGpu: bool = True,  # noqa: N803
        deepspeedConfig: str | Mapping[str, Any] | None = None,  # noqa: N803
        **options: Any,
    ) -> None:
        for name, value in (("numGpus", numGpus), ("nnodes", nnodes)):
            if value < 1:
                raise ConfigError(f"{name}={value}: must be at least 1")
        self.deepspeed_config = deepspeedConfig
        # The text itself, because the nodes may not see the driver's file.
        self._config = _text_of(deepspeedConfig)
        super().__init__(
            *(numGpus * nnodes, localMode, useGpu, "deepspeed.spark.distributor.ignoreSsl"),
            **options,
        )

    def _program(
        self,
        returned: Returned,
        train_object: Callable[..., Any] | str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        folder: str | None,
    ) -> Program:
        program = super()._program(returned, train_object, args, kwargs, folder)
        return replace(program, deepspeed=self._config)


def _text_of(config: str | Mapping[str, Any] | None) -> str:
    """Return the configuration as JSON; empty if there is none."""
    if config is None:
        return ""
    try:
        text = json.dumps(config) if isinstance(config, Mapping) else Path(config).read_text()
        is_object = isinstance(json.loads(text), dict)
    except (OSError, TypeError, ValueError) as error:
        raise ConfigError(
            f"deepspeedConfig={config!r} cannot be used: {error}. Give a dict, or the path of a "
            "JSON file on the driver"
        ) from error
    if not is_object:
        raise ConfigError(f"deepspeedConfig={config!r}: must hold a JSON object")
    return text
