"""A Lightning trainer that goes on after a failure, with the rows that it has not seen.

Runs in: child
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sparkdl.core.errors import ConfigError
from sparkdl.core.spec import DEFAULT_FEED
from sparkdl.lightning.adopted import TRAINERS, Adopted
from sparkdl.node.context import NodeContext, current

_FILE = "lightning.ckpt"


class Checkpoint(Adopted):
    """A callback that saves the trainer through `ctx.checkpoint`, with the rows that made it.

        checkpoint = sparkdl.lightning.Checkpoint(every_steps=500)
        trainer = Trainer(callbacks=[checkpoint], …)
        trainer.fit(model, data, ckpt_path=checkpoint.path)

    Args:
        every_steps: save each time that `trainer.global_step` is a multiple of it.
        every_epochs: save at the end of each epoch whose number, from 1, is one.
        feed: name of the feed of the training, if there are several; `None` if it comes from none.
        ctx: of this node, by default the one whose process this is.

    Raises:
        ConfigError: outside of a node, or without a time to save at.
        FrameworkMissingError: if there is no Lightning.
    """

    _packages = TRAINERS
    _base = ":Callback"

    def __init__(
        self,
        every_steps: int | None = None,
        every_epochs: int | None = None,
        feed: str | None = DEFAULT_FEED,
        ctx: NodeContext | None = None,
    ) -> None:
        super().__init__()
        ctx = ctx or current()
        if ctx is None:
            raise ConfigError("Checkpoint saves through a node's ctx: make it inside map_fun")
        if not (every_steps or every_epochs):
            raise ConfigError("say when to save: Checkpoint(every_steps=…) or every_epochs=…")
        self._ctx, self._every, self._feed = ctx, (every_steps, every_epochs), feed
        self._batches, self._saved = 0, -1

    @property
    def path(self) -> Path | None:
        """What to go on from, for `trainer.fit(ckpt_path=…)`; `None` at the very beginning."""
        last = self._ctx.last_checkpoint
        return last.folder / _FILE if last else None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Note which step is saved already."""
        self._saved = trainer.global_step

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count the batch; save if it is time."""
        self._batches += 1
        if self._every[0] and trainer.global_step % self._every[0] == 0:
            self._save(trainer)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Save if it is time."""
        if self._every[1] and (trainer.current_epoch + 1) % self._every[1] == 0:
            self._save(trainer)

    def _save(self, trainer: Any) -> None:
        step = trainer.global_step
        if step == self._saved:  # not every batch makes a step
            return
        batches: int | dict[str, int] | None = None
        if self._feed and self._ctx.batches_given():
            is_only = self._feed == DEFAULT_FEED  # or the only one, whatever its name
            batches = self._batches if is_only else {self._feed: self._batches}
        with self._ctx.checkpoint(step, batches=batches) as folder:
            trainer.save_checkpoint(folder / _FILE)
        self._saved = step
