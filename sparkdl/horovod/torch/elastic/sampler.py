"""`ElasticSampler`: rows of a data set shared out among the processes, also after a restart.

Runs in: child

https://github.com/horovod/horovod/blob/v0.28.1/horovod/torch/elastic/sampler.py
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sized
from typing import Any

from sparkdl.horovod.common import rank, size


class ElasticSampler:
    """Gives each process its share of a data set's indices, and skips used ones.

    For `DataLoader(…, sampler=sampler)`. Put it into the `TorchState`, call `record_batch` after
    each batch, and `set_epoch` at the end of each epoch.

    Args:
        dataset: its length must not change.
        shuffle: whether the order is random, another one in each epoch.
        seed: of that order, the same on all processes.

    Attributes:
        epoch: as it was set last.
        processed_num: how many indices of this epoch all processes together have used.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_num = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch without any used rows.

        Call it at the end of an epoch rather than at the beginning of one: a restart begins within
        an epoch, whose used rows must not be forgotten.
        """
        self.epoch = epoch
        self.processed_num = 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Note that each process has used a batch of so many rows."""
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, int]:
        """Return epoch and progress."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where another sampler of this data set was."""
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Share out the epoch's remaining indices among the current processes."""
        self.num_replicas, self.rank = size(), rank()
        indices = list(range(len(self.dataset)))
        if self.shuffle:
            # By seed and epoch alone: all processes, and restarted ones, have the same order.
            random.Random(self.seed + self.epoch).shuffle(indices)
        self.remaining_indices = indices[self.processed_num :]
        self.num_samples = math.ceil(len(self.remaining_indices) / self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        """Return this process's indices; some come twice, so that all have the same number."""
        left = self.remaining_indices
        extra = self.total_size - len(left)
        if left and extra:
            left = left + (left * math.ceil(extra / len(left)))[:extra]
        return iter(left[self.rank : self.total_size : self.num_replicas])

    def __len__(self) -> int:
        return self.num_samples
