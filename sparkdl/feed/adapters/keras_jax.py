"""A feed as what `fit` of Keras 3 takes, with the backend jax, on one node or several.

Runs in: child

Keras makes global arrays itself, out of the rows that each process holds by its distribution. So
it is given just these, as arrays of numpy.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from typing import Any

from sparkdl.core.errors import ConfigError, FrameworkMissingError
from sparkdl.feed.adapters.elements import Names, arrange
from sparkdl.feed.adapters.jax_mesh import GlobalRows, numbers
from sparkdl.feed.adapters.keras_epochs import let_epochs_differ
from sparkdl.feed.adapters.tensorflow import Fed
from sparkdl.feed.reader.batches import EpochBatches


def keras_data(batches: EpochBatches, x: Names | None, y: Names | None) -> Any:
    """Return a data adapter of Keras, see `JaxBatches.as_keras`."""
    rows = _rows()
    if rows is not None:
        batches = replace(batches, batch_size=rows.share_of(batches.batch_size))
    let_epochs_differ()
    # The length of an epoch is known only at its end, which Keras mistakes for an interruption.
    warnings.filterwarnings("ignore", "Your input ran out of data", UserWarning)

    def epoch() -> Iterator[Any]:
        for columns in batches:
            batches.reader.read_ahead(None)
            arrays = {name: numbers(name, column) for name, column in columns.items()}
            if rows is not None:
                share = batches.batch_size
                arrays = {name: rows.held(name, array, share) for name, array in arrays.items()}
            yield arrange(arrays, x, y)

    class FeedAdapter(_adapter(), Fed):  # type: ignore[misc]
        """Batches of an epoch whose length nobody knows before its end."""

        num_batches = batch_size = has_partial_batch = partial_batch_size = None
        _dataset = property(lambda self: self)

        def get_jax_iterator(self) -> Iterator[Any]:
            return epoch()

        get_numpy_iterator = get_jax_iterator

    return FeedAdapter(batches.reader)


def _adapter() -> Any:
    """Return the base class; Keras takes any data that is of it."""
    try:
        adapter = import_module("keras.src.trainers.data_adapters.data_adapter").DataAdapter
    except (ImportError, AttributeError) as error:
        raise FrameworkMissingError(
            f"this Keras cannot be fed: {error}. Install Keras 3.12 to 3.15"
        ) from error
    return adapter


def _rows() -> GlobalRows | None:
    """Return how Keras's distribution shards rows; `None` without one.

    Raises:
        ConfigError: if Keras has another backend, or several nodes would train without each other.
    """
    import jax

    keras = import_module("keras")
    if keras.backend.backend() != "jax":
        raise ConfigError(
            f"Keras uses {keras.backend.backend()}: set KERAS_BACKEND=jax before it is imported, "
            "which framework='jax' does unless it is set, or feed it by ctx.dataset"
        )
    distribution = keras.distribution.distribution()
    if distribution is not None:
        return GlobalRows.of(distribution.get_data_layout((1,)).backend_layout)
    if jax.process_count() > 1:
        raise ConfigError(
            "each node would train a model of its own: call keras.distribution.set_distribution("
            "keras.distribution.DataParallel(auto_shard_dataset=False)) before the model is made"
        )
    return None
