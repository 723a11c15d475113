"""The part of an executor that a model may use, and whether task slots share one model."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparkdl.core.errors import ConfigError
from sparkdl.core.settings import ALL_GPUS, EXECUTORS_GPUS, visible_gpus
from sparkdl.node.gpus import owned_gpus

MODEL_PER = ("auto", "slot", "executor")
"""The unit that has a copy of the model: each task slot, or each executor or each of its GPUs."""


@dataclass(frozen=True)
class Share:
    """The cores and GPUs that a model may use.

    Attributes:
        gpus: the addresses that Spark assigned, see `owned_gpus`; None if it assigns none.
        number: of the partition: spreads tasks over the GPUs if Spark assigns none.
    """

    cores: int
    gpus: tuple[str, ...] | None = None
    number: int = 0


def task_share() -> Share | None:
    """Return what this Spark task may use; None outside of tasks."""
    from pyspark import TaskContext

    from sparkdl.node.resources import assigned_gpus

    context = TaskContext.get()
    if context is None:
        return None
    return Share(context.cpus(), assigned_gpus(), context.partitionId())


@dataclass(frozen=True)
class Sharing:
    """Whether task slots share a model. Goes to Spark inside the task.

    Attributes:
        cores: of an executor; None for all of its host.
        gpus_per_task: what Spark assigns to a task, `spark.task.resource.gpu.amount`; 0 for none.
    """

    model_per: str = "slot"
    cores: int | None = None
    gpus_per_task: float = 0.0

    def device(self, share: Share | None, seen: Sequence[str]) -> str | None:
        """Return on which device this task's rows meet those of others, of those that are `seen`.

        It is an entry for CUDA_VISIBLE_DEVICES, empty for the CPU; None for a model of the task's
        own slot. With `auto` that is so on CPUs, where processes side by side are faster, and where
        each task has a whole GPU.
        """
        if self.model_per == "slot" or share is None:
            return None
        if share.gpus:
            is_crowded = 0 < self.gpus_per_task < 1
            found = next(iter(owned_gpus(share.gpus[:1])), "")
        elif seen:
            is_crowded, found = True, seen[share.number % len(seen)]
        else:
            is_crowded, found = False, ""
        return found if is_crowded or self.model_per == "executor" else None

    def own_device(self) -> str | None:
        """Return `device` for the task that runs here."""
        # What programs started here would see, as CUDA_VISIBLE_DEVICES names them.
        seen = visible_gpus()
        if seen is None:  # all, and not `nvidiactl` and others, which are no GPUs
            seen = tuple(str(n) for n, _ in enumerate(Path("/dev").glob("nvidia[0-9]*")))
        device = self.device(task_share(), seen)
        if device is None or sys.platform == "linux":
            return device
        if self.model_per == "auto":
            return None
        raise ConfigError(
            f"model_per='executor' needs Linux on the executors, and this is {sys.platform}: "
            "setModelPer('slot')"
        )


def sharing_of(spark: Any, model_per: str) -> Sharing:
    """Return whether task slots share a model, from the driver's settings of its executors."""

    def setting(name: str) -> str:
        return str(spark.conf.get(name, "") or "")

    local = re.match(r"local\[(\d+)", setting("spark.master"))
    cores = local[1] if local else setting("spark.executor.cores")
    gpus = float(setting("spark.task.resource.gpu.amount") or 0)
    return Sharing(model_per, int(cores) if cores.isdigit() else None, gpus)


def take_share(share: Share) -> None:
    """Limit every framework's cores and GPUs to this worker's share.

    Otherwise a framework takes all of them in each of Spark's workers. Other variables that are
    set already stay.
    """
    own = {
        "OMP_NUM_THREADS": str(share.cores),
        "TF_NUM_INTRAOP_THREADS": str(share.cores),
        "TF_NUM_INTEROP_THREADS": "1",
        "TF_FORCE_GPU_ALLOW_GROWTH": "true",
        "TQDM_DISABLE": "1",  # a bar for each batch, in an executor's log
    }
    if share.gpus and EXECUTORS_GPUS not in os.environ:
        own["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
        # What the executor sees is kept: Spark's next addresses count by it.
        owned = owned_gpus(share.gpus)
        os.environ[EXECUTORS_GPUS] = os.environ.get("CUDA_VISIBLE_DEVICES", ALL_GPUS)
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(owned)
    for name, value in own.items():
        # Before `make` runs: libraries read these when they are imported.
        os.environ.setdefault(name, value)
