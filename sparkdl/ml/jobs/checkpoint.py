"""Checkpoints of a training as Spark jobs, which the driver writes after each epoch.

Runs in: driver

A fit goes on only with what the same fit has left: its folder is named after a digest of its
settings and of all its rows. So folds and grids of a tuning may share a `checkpoint_dir`.
"""

from __future__ import annotations

import hashlib
import io
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow.fs as pafs

from sparkdl.core.errors import CheckpointError, ConfigError
from sparkdl.feed.values.ndarrays import Array
from sparkdl.storage import locate, open_storage

_log = logging.getLogger(__name__)
_FILE = "epoch.npz"


@dataclass(frozen=True)
class Progress:
    """How far a training is.

    Attributes:
        epochs: that are done.
        arrays: what the model's `save` returned.
        history: metric to its values, one an epoch.
    """

    epochs: int
    arrays: Sequence[Array]
    history: Mapping[str, Sequence[float]]


class Checkpoints:
    """The folder of one fit.

    Args:
        parent: URL of the folder that fits share.
        identity: of the fit: what differs between two trainings.

    Raises:
        ConfigError: if the storage cannot be opened.
    """

    def __init__(self, parent: str, identity: Sequence[object]) -> None:
        digest = hashlib.sha256(repr(identity).encode()).hexdigest()[:16]
        self.url = f"{parent.rstrip('/')}/jobs-{digest}"
        storage, self._folder = locate(self.url)
        self._system = open_storage(storage)

    def read(self) -> Progress | None:
        """Return where the same fit was before; None if it was not.

        Raises:
            CheckpointError: if what is there cannot be read.
        """
        path = f"{self._folder}/{_FILE}"
        try:
            if self._system.get_file_info(path).type == pafs.FileType.NotFound:
                return None
            with self._system.open_input_file(path) as file:
                content = file.read()
            with np.load(io.BytesIO(content), allow_pickle=False) as found:
                arrays = [found[f"array_{n}"] for n in range(int(found["arrays"]))]
                names = [str(name) for name in found["metrics"]]
                values = {name: found[f"metric_{n}"].tolist() for n, name in enumerate(names)}
                progress = Progress(int(found["epochs"]), arrays, values)
        except (OSError, ValueError, KeyError) as error:
            raise CheckpointError(
                f"the checkpoint {self.url}/{_FILE} cannot be read: {error}. Delete the folder to "
                "train from the start"
            ) from error
        _log.info("The training goes on after epoch %d of %s", progress.epochs, self.url)
        return progress

    def write(self, progress: Progress) -> None:
        """Write, and then replace what was there before.

        Raises:
            CheckpointError: if it cannot be written; what was there before still is.
        """
        file = io.BytesIO()
        history = progress.history
        np.savez(
            file,
            allow_pickle=False,
            epochs=np.array(progress.epochs),
            arrays=np.array(len(progress.arrays)),
            metrics=np.array(list(history), str),
            **{f"array_{n}": np.asarray(array) for n, array in enumerate(progress.arrays)},
            **{f"metric_{n}": np.asarray(values) for n, values in enumerate(history.values())},
        )
        try:
            self._system.create_dir(self._folder, recursive=True)
            draft = f"{self._folder}/draft"
            with self._system.open_output_stream(draft) as stream:
                stream.write(file.getvalue())
            self._system.move(draft, f"{self._folder}/{_FILE}")
        except OSError as error:
            raise CheckpointError(
                f"no checkpoint could be written to {self.url}: {error}"
            ) from error

    def delete(self) -> None:
        """Delete the folder: the training is over."""
        try:
            self._system.delete_dir(self._folder)
        except (OSError, ConfigError) as error:
            _log.warning("The checkpoint in %s was not deleted: %s", self.url, error)
