"""Hugging Face's Trainer on the feed, with checkpoints that record the rows used.

Runs in: child

`Trainer(train_dataset=ctx.torch_dataset(…))` needs nothing of this module: see `datasets/`.
https://huggingface.co/docs/transformers/main_classes/callback
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from sparkdl.core.errors import ConfigError
from sparkdl.core.files import scratch_of_child
from sparkdl.core.namesakes import missing_name
from sparkdl.core.spec import DEFAULT_FEED
from sparkdl.datasets.hugging_face import LoadedRows
from sparkdl.lightning import DualBase
from sparkdl.node.context import NodeContext, current

__all__ = ["Checkpoint"]
__path__: list[str] = []
"""Makes this a package, like another library's: its modules' names raise their replacement."""
__getattr__ = partial(missing_name, __name__)

_log = logging.getLogger(__name__)


class Checkpoint(DualBase):
    """A callback that copies the Trainer's checkpoints to `checkpoint_dir`, with the rows used.

        checkpoint = sparkdl.transformers.Checkpoint()
        trainer = Trainer(model, args, train_dataset=…, callbacks=[checkpoint])
        trainer.train(resume_from_checkpoint=checkpoint.path)

    The Trainer's arguments say when to save (`save_strategy`, `save_steps`), and `output_dir` may
    be a local folder of each node. The step waits for a local copy of the files; they are uploaded
    beside the training (`ctx.checkpoint_async`). The end of `train` waits for the last upload, and
    raises its error. A resumed training continues with the rows not covered by the
    checkpoint, so `ignore_data_skip` is set.

    Args:
        feed: name of the feed to train on, if there are several; `None` if none is read.
        ctx: of this node, by default the one whose process this is.

    Raises:
        ConfigError: outside of a node.
        FrameworkMissingError: if there is no transformers.
    """

    _packages = ("transformers",)
    _base = ":TrainerCallback"

    def __init__(self, feed: str | None = DEFAULT_FEED, ctx: NodeContext | None = None) -> None:
        ctx = ctx or current()
        if ctx is None:
            raise ConfigError("Checkpoint saves through a node's ctx: make it inside map_fun")
        self._ctx, self._feed = ctx, feed
        self._batches = self._pending = 0
        self._saved = -1
        self._rows: LoadedRows | None = None

    @property
    def path(self) -> str | None:
        """The folder to resume from, for `trainer.train(resume_from_checkpoint=…)`, or `None`."""
        last = self._ctx.last_checkpoint
        return str(last.folder) if last else None

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Keep a resuming Trainer from skipping rows: the feed skips them."""
        args.ignore_data_skip = True

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Check when the Trainer saves, see `LoadedRows.check`."""
        dataset = getattr(kwargs.get("train_dataloader"), "dataset", None)
        self._rows = dataset if isinstance(dataset, LoadedRows) else None
        if self._rows:
            self._rows.check(None, str(args.save_strategy.value))

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count a batch whose gradients wait for others'."""
        self._pending += 1

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._batches += self._pending + 1
        self._pending = 0

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Copy what all nodes have saved into a checkpoint, each file once.

        Raises:
            ConfigError: if the Trainer has saved nothing, or the rows used are not known.
            CheckpointError: see `NodeContext.checkpoint_async`.
        """
        step = state.global_step
        # A Trainer may save a step twice, by its interval and at its end.
        if step == self._saved:
            return
        if self._rows and not self._is_known() and control.should_training_stop:
            _log.warning("Training ended at step %d within an epoch: not in a checkpoint", step)
            return
        if self._rows:
            self._rows.check(self._batches, str(args.save_strategy.value))
        saved = Path(args.output_dir, f"checkpoint-{step}")
        self._ctx.barrier()  # several nodes may share a folder, and have all written to it now
        by_rank = self._ctx.all_gather(sorted(_files(saved)))
        rank = self._ctx.world.trainers.index(self._ctx.member)
        # Of files that several nodes see, the first one copies each.
        own = set(by_rank[rank]).difference(*by_rank[:rank])
        if not any(by_rank):
            raise ConfigError(
                f"the Trainer has saved nothing in {saved}: set save_strategy to other than 'no', "
                "and leave out save_only_model"
            )
        with self._ctx.checkpoint_async(step, batches=self._used()) as saving:
            # A copy, because the Trainer deletes and overwrites its own while this is uploaded.
            copy = Path(tempfile.mkdtemp(dir=scratch_of_child()))
            _put(own, saved, copy, shutil.copyfile)
            move = partial(shutil.move, copy_function=shutil.copyfile)
            saving.until(partial(_put, own, copy, saving.folder, move))
            saving.until(partial(shutil.rmtree, copy, ignore_errors=True))
        self._saved = step
        self._ctx.barrier()  # before a node removes a folder that others copy from

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Wait for the checkpoint in flight."""
        self._ctx._checkpoints.await_in_flight()

    def _is_known(self) -> bool:
        return self._rows is None or self._rows.used(self._batches) is not None

    def _used(self) -> int | dict[str, int]:
        """Return the batches used of the training's feed, or of the only one."""
        given = self._ctx.batches_given()
        if not (self._feed and given):
            return {}
        used = self._rows.used(self._batches) if self._rows else self._batches
        assert used is not None
        return used if len(given) == 1 else {self._feed: used}


def _files(folder: Path) -> list[str]:
    found = (Path(at, name) for at, _, names in os.walk(folder) for name in names)
    return [str(path.relative_to(folder)) for path in found]


def _put(names: Iterable[str], source: Path, target: Path, put: Callable[..., Any]) -> None:
    for name in names:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        put(source / name, target / name)
