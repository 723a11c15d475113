"""What the callbacks of `hvd.elastic` do.

Runs in: child

https://horovod.readthedocs.io/en/v0.28.1/api.html#module-horovod.keras.elastic
"""

from __future__ import annotations

from typing import Any

from sparkdl.core.errors import ConfigError
from sparkdl.horovod.common.elastic import State


class CommitState:
    """Commits the state every so many batches, and at the end of each epoch.

    The commit is made before the next batch, when all callbacks have seen the last one: so the
    order of the callbacks does not matter.

    Args:
        state: of the training.
        batches_per_commit: each commit is a checkpoint, so not too few.

    Raises:
        ConfigError: if that is no number from 1.
    """

    def __init__(self, state: State, batches_per_commit: int = 1) -> None:
        super().__init__()
        if batches_per_commit < 1:
            raise ConfigError(f"batches_per_commit={batches_per_commit}: give a number from 1")
        self.state = state
        self.batches_per_commit = batches_per_commit
        self._batches = 0
        self._is_due = False

    def on_train_begin(self, logs: Any = None) -> None:
        """Count anew."""
        self._batches, self._is_due = 0, False

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Commit what came before."""
        self._commit()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Count the batch."""
        self._batches += 1
        self._is_due = self._is_due or self._batches % self.batches_per_commit == 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Commit what came before."""
        self._commit()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Have the epoch committed."""
        self._is_due = True

    def on_train_end(self, logs: Any = None) -> None:
        """Commit the last epoch."""
        self._commit()

    def _commit(self) -> None:
        if self._is_due:
            self._is_due = False
            self.state.commit()


class UpdateBatchState:
    """Keeps the number of the batch in `state.batch`, 0 between epochs.

    Args:
        state: with an attribute `batch`.
    """

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Note the batch."""
        self.state.batch = batch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Begin again."""
        self.state.batch = 0


class UpdateEpochState:
    """Counts the epochs that are done in `state.epoch`, also over restarts.

    Give `fit` either `epochs=n - state.epoch`, or `initial_epoch=state.epoch, epochs=n`.

    Args:
        state: with an attribute `epoch`.
    """

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state
        self._is_first = True
        self._ahead = 0

    def on_train_begin(self, logs: Any = None) -> None:
        """Look at the first epoch again."""
        self._is_first = True

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Learn how Keras numbers the epochs."""
        if self._is_first:
            self._is_first, self._ahead = False, self.state.epoch - epoch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Count the epoch."""
        self.state.epoch = epoch + self._ahead + 1
