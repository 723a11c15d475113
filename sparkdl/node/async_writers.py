"""Waits for libraries that write a checkpoint in the background.

`ctx.checkpoint` is complete when its block ends, so each asynchronous save that began inside the
block must end before. Only libraries that the program has imported are looked at. A version whose
function is not found is not waited for; `CheckpointStore.late` finds its files.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from sparkdl.core.deadline import Deadline
from sparkdl.core.errors import CheckpointError
from sparkdl.core.patch import Function, Patch

Wait = Callable[[], object]

_begun: ContextVar[list[tuple[str, Wait]] | None] = ContextVar("sparkdl_async_saves", default=None)
"""The saves that began inside the block of this thread, by the name of their function."""


def _note(name: str, wait: Wait) -> None:
    saves = _begun.get()
    if saves is not None:
        saves.append((name, wait))


def _torch(stock: Function, executor: Any, *args: Any, **kwargs: Any) -> Any:
    future = stock(executor, *args, **kwargs)
    _note("torch.distributed.checkpoint.async_save", future.result)
    return future


def _orbax(stock: Function, checkpointer: Any, *args: Any, **kwargs: Any) -> Any:
    saved = stock(checkpointer, *args, **kwargs)
    _note("orbax.checkpoint.AsyncCheckpointer.save", checkpointer.wait_until_finished)
    return saved


def _orbax_v1(stock: Function, response: Any, *args: Any, **kwargs: Any) -> Any:
    made = stock(response, *args, **kwargs)
    _note("orbax.checkpoint.v1.save_async", response.result)
    return made


def _tensorflow(stock: Function, helper: Any, *args: Any, **kwargs: Any) -> Any:
    saved = stock(helper, *args, **kwargs)

    def wait() -> None:
        helper.sync()
        helper._check_async_thread_error()

    _note("tf.train.Checkpoint with experimental_enable_async_checkpoint", wait)
    return saved


def _lightning(stock: Function, plugin: Any, *args: Any, **kwargs: Any) -> Any:
    saved = stock(plugin, *args, **kwargs)

    def wait() -> None:
        # It has one thread, which works in order.
        plugin._executor.submit(int).result()
        if plugin._error:
            raise plugin._error

    _note("AsyncCheckpointIO", wait)
    return saved


_TORCH, _TF = "torch.distributed.checkpoint", "tensorflow.python.checkpoint.async_checkpoint_helper"
_ORBAX_V1 = "orbax.checkpoint.experimental.v1._src.saving.execution"
_LIGHTNING = ("lightning.pytorch.plugins.io", "pytorch_lightning.plugins.io")
_PATCHES = (
    *(
        Patch(f"{_TORCH}._async_{kind.lower()}_executor:_{kind}BasedAsyncCheckpointExecutor"
              ".execute_save", ("self",), _torch)
        for kind in ("Thread", "Process")
    ),
    Patch("orbax.checkpoint:AsyncCheckpointer.save", ("self",), _orbax),
    Patch(f"{_ORBAX_V1}:_SaveResponse.__init__", ("self",), _orbax_v1),
    *(Patch(f"{_TF}:AsyncCheckpointHelper.{name}", ("self",), _tensorflow)
      for name in ("_write", "save")),
    *(Patch(f"{module}.async_plugin:AsyncCheckpointIO.save_checkpoint", ("self",), _lightning)
      for module in _LIGHTNING),
)  # fmt: skip


@contextmanager
def waited_for(timeout_s: float) -> Iterator[None]:
    """Wait, when the block ends, for the asynchronous saves that began in it.

    Raises:
        CheckpointError: if a save fails, or does not end within `timeout_s`.
    """
    for patch in _PATCHES:
        # A module that is not there yet is not imported for this: that takes up to a second.
        if patch.target.partition(":")[0] in sys.modules and not patch.objection():
            patch.apply()
    saves: list[tuple[str, Wait]] = []
    _begun.set(saves)
    try:
        yield
    finally:
        _begun.set(None)
    deadline = Deadline.after(timeout_s)
    for name, wait in saves:
        _wait(name, wait, deadline, timeout_s)


def _wait(name: str, wait: Wait, deadline: Deadline, timeout_s: float) -> None:
    errors: list[BaseException] = []

    def run() -> None:
        try:
            wait()
        except BaseException as error:  # noqa: BLE001 (raised below, by the thread that waits)
            errors.append(error)

    # Most of these waits take no timeout of their own.
    thread = threading.Thread(target=run, name="sparkdl-async-save", daemon=True)
    thread.start()
    thread.join(deadline.wait_s)
    if thread.is_alive():
        raise CheckpointError(
            f"{name}, begun inside ctx.checkpoint, has not ended within Feeding(timeout_s="
            f"{timeout_s:g})"
        )
    if errors:
        raise CheckpointError(
            f"{name}, begun inside ctx.checkpoint, failed: {type(errors[0]).__name__}: {errors[0]}"
        ) from errors[0]
