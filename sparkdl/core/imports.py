"""Imports of a framework without its unused packages, advice on a missing module, the collector."""

from __future__ import annotations

import gc
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import LazyLoader
from types import FrameType, ModuleType

from sparkdl.core.errors import SparkdlError

_LOOK = threading.Lock()
"""Two that look at once could turn the collector on for each other."""


@contextmanager
def gc_disabled() -> Iterator[None]:
    """Disable the garbage collector in the block.

    Importing a large library makes hundreds of thousands of objects that stay. The collector would
    look through them again and again: a quarter of the time that TensorFlow's import takes.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def frames_of_threads() -> dict[int, FrameType]:
    """Return the current frame of each thread, by ident, as `sys._current_frames` does.

    The collector rests meanwhile. Early releases of Python 3.11 make frame objects while they hold
    a lock of the interpreter: a collection that began there would lock up the whole process.
    https://github.com/python/cpython/issues/106883
    """
    with _LOOK, gc_disabled():
        return sys._current_frames()


_LATER = frozenset(
    f"{keras}.{module}"
    for keras in ("keras", "keras.src", "keras._tf_keras.keras")
    for module in ("visualization", "wrappers")
)
"""Modules of Keras that import scikit-learn (with SciPy's statistics) and Matplotlib where
installed. That is a quarter of TensorFlow's import time, and a training seldom uses them."""


@contextmanager
def quick_imports() -> Iterator[None]:
    """Make the imports inside faster; meant for a framework.

    Python's collector rests, and two leaves of Keras are run when one first reads from them
    (https://docs.python.org/3/library/importlib.html#importlib.util.LazyLoader). Two TensorFlow
    nodes are launched in 3.6 s instead of 5.0 s this way: medians of five on two cores.
    """
    finder = LaterFinder()
    with gc_disabled():
        # In front of Python's own finders, which would find the modules before this one is asked.
        sys.meta_path.insert(0, finder)
        try:
            yield
        finally:
            sys.meta_path.remove(finder)


class LaterFinder:
    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in _LATER:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = LazyLoader(spec.loader)
        return spec


def advice_on_missing(error: BaseException) -> str:
    """Return how to bring a module to the executors, if `error` is that one is missing there."""
    if not isinstance(error, ModuleNotFoundError) or isinstance(error, SparkdlError):
        return ""
    module = (error.name or "the module").partition(".")[0]
    return (
        f"{socket.gethostname()} has no module {module!r}. Install it on all executors; or ship "
        f"its file before the launch: spark.sparkContext.addPyFile('{module}.py'), or --py-files "
        "of spark-submit; or have the driver send its code with yours: "
        f"cloudpickle.register_pickle_by_value({module})"
    )
