"""Horovod's `common.util`: checks of installed features, and small helpers for programs.

Runs in: child, driver

https://github.com/horovod/horovod/blob/v0.28.1/horovod/common/util.py
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from itertools import pairwise
from typing import Any, TypeVar

from sparkdl.core.errors import ConfigError, FrameworkMissingError
from sparkdl.horovod.common.basics import (
    ccl_built,
    cuda_built,
    ddl_built,
    gloo_built,
    mpi_built,
    nccl_built,
    rocm_built,
)

__all__ = [
    "EXTENSIONS",
    "_cache",
    "ccl_built",
    "check_extension",
    "check_installed_version",
    "cuda_built",
    "ddl_built",
    "env",
    "extension_available",
    "gloo_built",
    "gpu_available",
    "is_iterable",
    "is_version_greater_equal_than",
    "mpi_built",
    "nccl_built",
    "num_rank_is_power_2",
    "rocm_built",
    "split_list",
]

EXTENSIONS = ["tensorflow", "torch"]
T = TypeVar("T")


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether Horovod's face for a framework can be used: the framework is installed."""
    return ext_base_name in EXTENSIONS and find_spec(ext_base_name) is not None


def check_extension(ext_name: str, ext_env_var: str, pkg_path: str, *args: str) -> None:
    """Do nothing where a framework is installed; nothing is compiled for it.

    Args:
        ext_name: `horovod.torch` or `horovod.tensorflow`; the others are accepted.

    Raises:
        FrameworkMissingError: if it is not installed; an ImportError, as in Horovod.
    """
    framework = ext_name.rpartition(".")[2]
    if not extension_available(framework):
        raise FrameworkMissingError(f"{ext_name} needs {framework}: pip install {framework}")


def check_installed_version(name: str, version: str, exception: Any = None) -> None:
    """Do nothing: nothing was compiled for a version of a framework."""


def is_version_greater_equal_than(ver: str, target: str) -> bool:
    """Whether version `ver` is `target` or a later one.

    Raises:
        ConfigError: if they are no strings that begin with numbers, or `target` is not like
            `major.minor.patch`.
    """
    if not isinstance(ver, str) or not isinstance(target, str):
        raise ConfigError(f"{ver!r} and {target!r}: versions must be strings")
    if target.count(".") != 2:
        raise ConfigError(f"target={target!r}: must be of the form major.minor.patch")
    return _version(ver) >= _version(target)


def _version(text: str) -> tuple[Any, ...]:
    """Return what orders versions: their numbers, and whether they are final."""
    found = re.match(r"v?(\d+(?:\.\d+)*)[.-]?(a|b|c|rc|dev)?", text)
    if not found:
        raise ConfigError(f"{text!r}: a version must begin with numbers, like 2.16.1")
    numbers = [int(part) for part in found[1].split(".")]
    return *numbers, *[0] * (6 - len(numbers)), found[2] is None


def _cache(function: Callable[..., T]) -> Callable[..., T]:
    """Remember what a function has returned for arguments."""
    return cache(function)


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether a framework sees a GPU in this process.

    Raises:
        ConfigError: for another framework than PyTorch and TensorFlow.
    """
    if ext_base_name not in EXTENSIONS:
        raise ConfigError(f"gpu_available({ext_base_name!r}): choose 'tensorflow' or 'torch'")
    if not extension_available(ext_base_name):
        return False
    if ext_base_name == "torch":
        import torch

        return bool(torch.cuda.is_available())
    import tensorflow as tf

    return bool(tf.config.list_physical_devices("GPU"))


@contextmanager
def env(**variables: str | None) -> Iterator[None]:
    """Set environment variables within a block; a value of `None` leaves its variable unchanged."""
    chosen = {name: value for name, value in variables.items() if value is not None}
    before = {name: os.environ.get(name) for name in chosen}
    os.environ.update(chosen)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def split_list(items: Sequence[T], parts: int) -> list[Sequence[T]]:
    """Return `items` in so many parts of about the same length, the longer ones first."""
    short, longer = divmod(len(items), parts)
    ends = [number * short + min(number, longer) for number in range(parts + 1)]
    return [items[start:end] for start, end in pairwise(ends)]


def num_rank_is_power_2(num_rank: int) -> bool:
    """Whether a number of ranks is a power of two."""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0


def is_iterable(value: Any) -> bool:
    """Whether `iter` takes a value."""
    try:
        iter(value)
    except TypeError:
        return False
    return True
