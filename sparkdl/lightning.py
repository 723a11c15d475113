"""PyTorch Lightning on the nodes: its cluster environment, its data and its checkpoints.

Runs in: child

For `lightning` and for `pytorch_lightning`: whichever the program has imported. See
docs/pytorch.md.
"""

from __future__ import annotations

import logging
import os
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, TypeAlias

from sparkdl.core.errors import ConfigError, FrameworkMissingError
from sparkdl.core.spec import DEFAULT_FEED
from sparkdl.datasets.tensorflow import readers_of
from sparkdl.node.context import NodeContext, current

__all__ = ["Checkpoint", "Environment", "FeedDataModule"]

_log = logging.getLogger(__name__)
FABRICS = ("lightning.fabric", "lightning_fabric")
TRAINERS = ("lightning.pytorch", "pytorch_lightning")
Names: TypeAlias = "str | Sequence[str] | None"
_FILE = "lightning.ckpt"


class DualBase:
    """Makes instances of both `lightning` and `pytorch_lightning` base classes, where imported.

    Both libraries check for their own classes.
    """

    _packages: tuple[str, ...]
    _base: str

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Return an instance of this class and of the library's."""
        module, _, name = cls._base.rpartition(":")
        homes = [f"{package}{module}" for package in _there(cls._packages)]
        bases = tuple(getattr(import_module(home), name) for home in homes)
        body = {"__module__": cls.__module__, "__doc__": cls.__doc__}
        kind: Any = types.new_class(cls.__name__, (cls, *bases), None, lambda ns: ns.update(body))
        # A subclass of `cls`, so Python calls `__init__` on it.
        return object.__new__(kind)


def _there(packages: tuple[str, ...]) -> tuple[str, ...]:
    """Return the imported ones of `packages`, or else the first that can be imported."""
    if imported := tuple(package for package in packages if package in sys.modules):
        return imported
    for package in packages:
        with suppress(ImportError):
            import_module(package)
            return (package,)
    raise FrameworkMissingError(
        f"{packages[0]} cannot be imported on this executor; pip install 'sparkdl[torch]'"
    )


class Environment(DualBase):
    """A `ClusterEnvironment` for `Trainer(plugins=[…])` and `Fabric(plugins=[…])`.

    It is Lightning's for torchrun, except that each node of the cluster is one of Lightning's nodes
    with one device, wherever it is: give `num_nodes=ctx.num_workers` and `devices=1`.
    https://lightning.ai/docs/pytorch/stable/clouds/cluster_expert.html

    Raises:
        ConfigError: outside of a node that trains; and in the trainer, if `num_nodes` or `devices`
            do not match the cluster.
        FrameworkMissingError: if there is no Lightning.
    """

    _packages = FABRICS
    _base = ".plugins.environments:TorchElasticEnvironment"

    def __init__(self) -> None:
        if "TORCHELASTIC_RUN_ID" not in os.environ:
            raise ConfigError(
                "lightning.Environment is for nodes that train with PyTorch: make it inside "
                "map_fun of launch(framework='torch')"
            )

    def set_world_size(self, size: int) -> None:
        _check("WORLD_SIZE", size, "num_nodes * devices")

    def set_global_rank(self, rank: int) -> None:
        """Compare with what the trainer makes of `node_rank` and `devices`."""
        _check("RANK", rank, "several devices for each node: rank")

    def local_rank(self) -> int:
        """Return 0: a node sees its own devices only."""
        return 0

    def node_rank(self) -> int:
        """Return this node's rank."""
        return int(os.environ["RANK"])


def _check(variable: str, value: int, counted: str) -> None:
    if value != int(os.environ[variable]):
        size = os.environ["WORLD_SIZE"]
        raise ConfigError(
            f"the Trainer counts {counted} = {value}, and {variable} of this node is "
            f"{os.environ[variable]}: each node is one process with one device. Write "
            f"Trainer(devices=1, num_nodes={size}), or num_nodes=ctx.num_workers"
        )


class FeedDataModule(DualBase):
    """A `LightningDataModule` over feeds; each epoch of the trainer is one of the feed.

    Batches have the node's own rows, so Lightning adds no `DistributedSampler`. All nodes take the
    same number of steps.

    Args:
        batch_size: rows in a step, of each node; `None` with `Feeding(global_batch_size=…)`.
        x: column of the features, or several for a dict of features.
        y: column or columns of the labels.
        validation: name of the feed to validate on: call `cluster.feed_async(df, epochs=…,
            feed="validation")` before feeding the rows to train on.
        num_workers: processes of each loader.
        ctx: of this node, by default the one whose process this is.
        collate_fn: turns a batch into the module's input, as in `DataLoader`.
        options: `feed`, `even`, `tail`, `shuffle`, `seed` to train with; `pad`, `sparse` and
            `tail="pad"` for all feeds; see `NodeContext.batches`.

    Raises:
        ConfigError: outside of a node.
        FrameworkMissingError: if there is no Lightning.
    """

    _packages = TRAINERS
    _base = ":LightningDataModule"

    def __init__(
        self,
        batch_size: int | None = None,
        x: Names = None,
        y: Names = None,
        *,
        validation: str | None = None,
        num_workers: int = 0,
        ctx: NodeContext | None = None,
        collate_fn: Callable[[Any], Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        ctx = ctx or current()
        if ctx is None:
            raise ConfigError("FeedDataModule reads the feed of a node: make it inside map_fun")
        self._ctx, self._names, self._workers = ctx, (x, y), num_workers
        self._collate = collate_fn
        self.batch_size, self._options = batch_size, {"feed": DEFAULT_FEED, **options}
        if validation is not None:  # Lightning takes a missing method for a missing loader
            padded = {"tail": "pad"} if options.get("tail") == "pad" else {}
            alike = {"pad": options.get("pad"), "sparse": options.get("sparse", ())}
            own = {"feed": validation, **alike, **padded}
            self.val_dataloader = lambda: _NoSanityCheck(self._loader(own), self)

    def train_dataloader(self) -> Any:
        """Return what loads the feed of the training."""
        trainer = getattr(self, "trainer", None)
        if getattr(trainer, "reload_dataloaders_every_n_epochs", 0):
            raise ConfigError(
                "reload_dataloaders_every_n_epochs: Lightning would begin an epoch of the feed "
                "twice. Leave it out: the loaders last for the whole feed"
            )
        return _UntilFeedEnds(self._loader(self._options), self)

    def _loader(self, options: dict[str, Any]) -> Any:
        from torch.utils.data import DataLoader

        x, y = self._names
        data: Any = self._ctx.torch_dataset(self.batch_size, x, y, **options)
        data.is_read_ahead = True  # a Trainer fetches a batch ahead
        # The dataset gives whole batches, so the loader makes none.
        return DataLoader(
            data, batch_size=None, num_workers=self._workers, collate_fn=self._collate
        )


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
        # Lightning would go through empty epochs, until `max_epochs`.
        if not has_rows:
            trainer = self.data.trainer
            _log.warning(
                "The feed has ended, and with it the training: epoch %d of %s has no rows. Feed "
                "as many epochs as max_epochs",
                *(trainer.current_epoch + 1, trainer.max_epochs),
            )
            trainer.should_stop = True


@dataclass(frozen=True)
class _NoSanityCheck:
    """A loader that is empty in Lightning's sanity check, whose rows the feed would not repeat."""

    loader: Any
    data: Any

    def __iter__(self) -> Iterator[Any]:
        is_check = getattr(self.data.trainer, "sanity_checking", False)
        return iter(() if is_check else self.loader)


class Checkpoint(DualBase):
    """A callback that saves the trainer through `ctx.checkpoint_async`, with the rows used so far.

        checkpoint = sparkdl.lightning.Checkpoint(every_steps=500)
        trainer = Trainer(callbacks=[checkpoint], …)
        trainer.fit(model, data, ckpt_path=checkpoint.path)

    Lightning writes its file within the step; the upload continues beside the training. The end of
    `fit` waits for the last one, and raises its error.

    Args:
        every_steps: save each time that `trainer.global_step` is a multiple of it.
        every_epochs: save at the end of each epoch whose number, from 1, is a multiple of it.
        feed: name of the feed to train on, if there are several; `None` if none is read.
        ctx: of this node, by default the one whose process this is.

    Raises:
        ConfigError: outside of a node, or without `every_steps` and `every_epochs`.
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
        """The checkpoint to resume from, for `trainer.fit(ckpt_path=…)`; `None` at first."""
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
        every = self._every[0]
        if every and trainer.global_step % every == 0:
            self._save(trainer)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Save if it is time."""
        if self._every[1] and (trainer.current_epoch + 1) % self._every[1] == 0:
            self._save(trainer)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Wait for the checkpoint in flight."""
        self._ctx._checkpoints.await_in_flight()

    def _save(self, trainer: Any) -> None:
        step = trainer.global_step
        if step == self._saved:  # not every batch makes a step
            return
        with self._ctx.checkpoint_async(step, batches=self._used(trainer)) as saving:
            # Not to a copy elsewhere: sharded strategies make all nodes write to rank 0's path.
            trainer.save_checkpoint(saving.folder / _FILE)
        self._saved = step

    def _used(self, trainer: Any) -> dict[str, int]:
        from torch.utils._pytree import tree_leaves

        given = self._ctx.batches_given()
        # A validation begins each time at the first row of an epoch, so one that was left early, as
        # the sanity check is, counts for nothing.
        readers = [r for each in tree_leaves(trainer.val_dataloaders) for r in readers_of(each)]
        used = {reader.feed: reader.batches_ended for reader in readers}
        others = [feed for feed in given if feed not in used]
        if self._feed is None or not others:
            return used
        is_only = self._feed not in others and len(others) == 1  # whatever its name
        return {**used, others[0] if is_only else self._feed: self._batches}
