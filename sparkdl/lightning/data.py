"""Feeds as the data of a Lightning trainer.

Runs in: child
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from sparkdl.core.errors import ConfigError
from sparkdl.core.spec import DEFAULT_FEED
from sparkdl.lightning.adopted import TRAINERS, Adopted
from sparkdl.node.context import NodeContext, current

_log = logging.getLogger(__name__)

Names: TypeAlias = "str | Sequence[str] | None"


class FeedDataModule(Adopted):
    """A `LightningDataModule` over feeds; each epoch of the trainer is one of the feed.

    Batches have the node's own rows, so Lightning adds no `DistributedSampler`. All nodes take the
    same number of steps.

    Args:
        batch_size: rows in a step, of each node.
        x: column of the features, or several for a dict of features.
        y: column or columns of the labels.
        validation: name of the feed of the validation: `cluster.feed_async(df, epochs=…,
            name="validation")`, begun before the training's.
        test: likewise, for `trainer.test`.
        num_workers: processes of each loader.
        rows: of one epoch, of all nodes together; makes `steps_per_epoch` known.
        ctx: of this node, by default the one whose process this is.
        options: `feed`, `even`, `tail`, `shuffle`, `seed` of the training, see
            `NodeContext.batches`.

    Raises:
        ConfigError: outside of a node.
        FrameworkMissingError: if there is no Lightning.
    """

    _packages = TRAINERS
    _base = ":LightningDataModule"

    def __init__(
        self,
        batch_size: int,
        x: Names = None,
        y: Names = None,
        *,
        validation: str | None = None,
        test: str | None = None,
        num_workers: int = 0,
        rows: int | None = None,
        ctx: NodeContext | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        ctx = ctx or current()
        if ctx is None:
            raise ConfigError("FeedDataModule reads the feed of a node: make it inside map_fun")
        self._ctx, self._names, self._workers = ctx, (x, y), num_workers
        self.batch_size, self._rows = batch_size, rows
        self._feeds = {"train": {"feed": DEFAULT_FEED, **options}}
        for stage, feed in (("val", validation), ("test", test)):
            if feed is not None:  # what is not there is no loader to Lightning
                self._feeds[stage] = {"feed": feed}
                setattr(self, f"{stage}_dataloader", partial(self._loader, stage))

    @property
    def steps_per_epoch(self) -> int:
        """How many steps an epoch of the training takes, for learning rate schedules.

        Raises:
            ConfigError: without `rows`.
        """
        if self._rows is None:
            raise ConfigError("FeedDataModule(rows=…) has to say how many rows an epoch has")
        return -(-self._rows // (self.batch_size * self._ctx.num_workers))

    def train_dataloader(self) -> Any:
        """Return what loads the feed of the training."""
        return _UntilFeedEnds(self._loader("train"), self)

    def _loader(self, stage: str) -> Any:
        from torch.utils.data import DataLoader

        x, y = self._names
        data = self._ctx.torch_dataset(self.batch_size, x, y, **self._feeds[stage])
        return DataLoader(data, batch_size=None, num_workers=self._workers)


@dataclass(frozen=True)
class _UntilFeedEnds:
    """A loader that stops the trainer when the feed has no further epoch."""

    loader: Any
    data: Any

    def __iter__(self) -> Iterator[Any]:
        has_rows = False
        for batch in self.loader:
            has_rows = True
            yield batch
        if not has_rows:
            trainer = self.data.trainer
            _log.warning(
                "The feed has ended, and with it the training: epoch %d of %s has no rows",
                *(trainer.current_epoch + 1, trainer.max_epochs),
            )
            trainer.should_stop = True
