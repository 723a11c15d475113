"""Horovod's `tensorflow.compression`, for programs that import from there."""

from sparkdl.horovod.common.compression import *  # noqa: F403 (all of it)
from sparkdl.horovod.common.compression import __all__ as __all__
