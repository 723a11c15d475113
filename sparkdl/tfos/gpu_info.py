"""TensorFlowOnSpark's `gpu_info`: which GPUs of this host are free.

It asks NVML (package `nvidia-ml-py`, the extra `gpu`), so names of products do not matter.
https://github.com/yahoo/TensorFlowOnSpark/blob/v2.2.5/tensorflowonspark/gpu_info.py
"""

from __future__ import annotations

import random

from sparkdl.core.errors import ConfigError, FrameworkMissingError
from sparkdl.core.settings import visible_gpus
from sparkdl.node.gpus import is_claimed, list_gpus, open_nvml

__all__ = ["AS_LIST", "AS_STRING", "get_gpus", "is_gpu_available"]

AS_STRING = "string"
AS_LIST = "list"


def is_gpu_available() -> bool:
    """Whether this host has an NVIDIA GPU, and NVML to find it."""
    try:
        with open_nvml() as nvml:
            return bool(nvml.nvmlDeviceGetCount() > 0)
    except FrameworkMissingError:
        return False


def get_gpus(num_gpu: int = 1, worker_index: int = -1, format: str = AS_STRING) -> str | list[str]:
    """Return GPUs without processes that no other node of a cluster has claimed.

    Args:
        num_gpu: how many.
        worker_index: order of the asking process among those of this host, so that each gets
            others; negative for any, at random.
        format: `AS_STRING` for what CUDA_VISIBLE_DEVICES takes, `AS_LIST` for a list.

    Returns:
        UUIDs.

    Raises:
        FrameworkMissingError: if NVML or its package is missing.
        ConfigError: if the host has fewer, or too few are free.
    """
    if format not in (AS_STRING, AS_LIST):
        raise ConfigError(f"format={format!r}: choose gpu_info.AS_STRING or gpu_info.AS_LIST")
    if num_gpu < 0:
        raise ConfigError(f"num_gpu={num_gpu} must be 0 or more")
    # The caller's own GPUs are claimed as well, by its agent.
    own = visible_gpus() or ()
    with open_nvml() as nvml:
        gpus = list_gpus(nvml)
        idle = [gpu.uuid for gpu in gpus if not gpu.pids]
        free = [uuid for uuid in idle if uuid in own or not is_claimed(uuid)]
    if len(free) < num_gpu:
        raise ConfigError(
            f"{num_gpu} GPUs were asked for, and this host has {len(gpus)}, of which {len(free)} "
            "are free. Ask for fewer (num_gpus), or end what computes on them"
        )
    first = worker_index * num_gpu
    chosen = [free[(first + i) % len(free)] for i in range(num_gpu)]
    if worker_index < 0:
        chosen = random.sample(free, num_gpu)
    return ",".join(chosen) if format == AS_STRING else chosen
