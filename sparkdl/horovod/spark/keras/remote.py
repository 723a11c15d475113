"""The training of a Keras model in one of several processes.

Runs in: child

https://github.com/horovod/horovod/blob/v0.28.1/horovod/spark/keras/remote.py
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from sparkdl.core.errors import ConfigError, SparkdlError
from sparkdl.core.scratch import scratch_folder
from sparkdl.horovod.keras.callbacks import Schedule
from sparkdl.horovod.spark.common.util import say
from sparkdl.horovod.spark.common.work import Work
from sparkdl.horovod.spark.keras.models import (
    OptimizerState,
    batch_of,
    input_of,
    rate_of,
    unpickled,
)
from sparkdl.ml.estimators.keras_model import class_labels
from sparkdl.ml.estimators.keras_objects import loaded, named_objects
from sparkdl.ml.scoring.inputs import check_classes


@dataclass(frozen=True)
class KerasTrainer:
    """The training function of each process.

    Attributes:
        library: `keras` or `tf_keras`.
        input_shapes, output_shapes: of the model.
        checkpoint: the name of the model's file.
    """

    work: Work
    library: str
    input_shapes: list[list[int]]
    output_shapes: list[list[int]]
    checkpoint: str

    def __call__(self) -> dict[str, list[float]] | None:
        """Train; return the history, on rank 0."""
        self.work.start()
        hvd = import_module(
            "sparkdl.horovod.keras"
            if self.library == "keras"
            else "sparkdl.horovod.tensorflow.keras"
        )
        hvd.init()
        _choose_gpu(hvd, self.work.params.use_gpu)
        if self.work.params.random_seed is not None:
            import tensorflow as tf

            tf.random.set_seed(self.work.params.random_seed)
        with scratch_folder() as folder:
            return self._train(hvd, folder)

    def _train(self, hvd: Any, folder: Path) -> dict[str, list[float]] | None:
        work, params = self.work, self.work.params
        is_root = hvd.rank() == 0
        model, known = self._model(hvd)
        steps, val_steps = work.steps(hvd.size())
        callbacks = self._callbacks(hvd, model, folder)
        if is_root and params.verbose:
            work.describe(hvd.size())
        raised: list[SparkdlError] = []
        # Callbacks save the model: its files have the names that the driver knows its functions by.
        with (
            work.rows(hvd.rank(), hvd.size()) as rows,
            named_objects(model, known),
            _as_raised(raised),
        ):
            train, val = (
                None if batches is None else self._data(model, batches, raised)
                for batches in (rows.train_data, rows.val_data if work.val is not None else None)
            )
            history = model.fit(
                train,
                validation_data=val,
                steps_per_epoch=steps,
                validation_steps=val_steps or None,
                callbacks=callbacks,
                # A line for each epoch, since bars of progress do not fit into a log.
                verbose=2 if is_root and params.verbose else 0,
                epochs=params.epochs,
                shuffle=False,  # the rows come in random order
            )
        if not is_root:
            return None
        if not (folder / self.checkpoint).is_file():
            raise ConfigError(
                "checkpoint_callback has saved no model: its monitor must be one of "
                f"{', '.join(history.history)}, and save_freq below the batches of all epochs"
            )
        work.send(folder / self.checkpoint, "result")
        return {name: [float(x) for x in values] for name, values in history.history.items()}

    def _model(self, hvd: Any) -> tuple[Any, dict[str, Any]]:
        """Return the compiled model, with the learning rate of all processes, and its objects."""
        params = self.work.params
        with self.work.received("start") as file:
            content, known, state, loss, metrics = unpickled(file.read_bytes())
        model = loaded(content, known, self.library)
        optimizer: OptimizerState = state
        made = optimizer.optimizer(self.library, known)
        compression = params.gradient_compression or hvd.Compression.none
        model.compile(
            hvd.DistributedOptimizer(made, compression=compression),
            loss=loss,
            loss_weights=params.loss_weights,
            metrics=metrics or None,
        )
        optimizer.restore(model.optimizer, model.trainable_variables)
        rate = rate_of(model.optimizer)
        if rate is not None:
            # As in Horovod's: the batch of all processes is so much larger.
            model.optimizer.learning_rate = rate * hvd.size()
        elif hvd.rank() == 0:
            say("The learning rate is a schedule: it is not multiplied by the number of processes")
        return model, known

    def _callbacks(self, hvd: Any, model: Any, folder: Path) -> list[Any]:
        params, keras = self.work.params, import_module(self.library)
        rate = rate_of(model.optimizer)
        for each in params.callbacks:
            if isinstance(each, Schedule) and rate is not None:
                each.initial_lr = rate
        logs_dir = str(folder / self.work.store.get_logs_subdir())
        board = [each for each in params.callbacks if isinstance(each, keras.callbacks.TensorBoard)]
        found = [
            hvd.callbacks.BroadcastGlobalVariablesCallback(0),
            # Before the user's callbacks, which then see the averages.
            hvd.callbacks.MetricAverageCallback(),
            *(each for each in params.callbacks if each not in board),
        ]
        if hvd.rank() != 0:
            return found
        path = str(folder / self.checkpoint)
        saver = params.checkpoint_callback or keras.callbacks.ModelCheckpoint(path)
        saver.filepath = path
        found += _with_rate_of_one(keras, model, saver, hvd.size())
        if self.work.store.saving_runs():
            board = board or [keras.callbacks.TensorBoard(logs_dir)]
            for each in board:
                each.log_dir = logs_dir
            sync = self.work.store.sync_fn(self.work.run_id)
            found += [*board, _on_epoch_end(keras, lambda: sync(str(folder)))]
        return found

    def _data(self, model: Any, batches: Callable[[], Any], raised: list[SparkdlError]) -> Any:
        """Return what `fit` takes.

        Args:
            raised: takes the error of the rows, of which TensorFlow makes one of its own.
        """
        import tensorflow as tf

        stream = batches()
        # TensorFlow needs the types beforehand, and a transformation's are known only from rows.
        first = next(stream)
        begun = [itertools.chain([first], stream)]

        def generate() -> Iterator[Any]:
            # The first start goes on with the stream that `first` comes from; others begin anew.
            try:
                for batch in begun.pop() if begun else batches():
                    yield self._arrays(model, batch)
            except SparkdlError as error:
                raised.append(error)
                raise

        signature = tf.nest.map_structure(
            lambda array: tf.TensorSpec([None, *array.shape[1:]], tf.as_dtype(array.dtype)),
            self._arrays(model, first),
        )
        dataset = tf.data.Dataset.from_generator(generate, output_signature=signature)
        return dataset.prefetch(tf.data.AUTOTUNE)

    def _arrays(self, model: Any, batch: dict[str, Any]) -> tuple[Any, ...]:
        """Return inputs, labels, and weights if there are any."""
        params = self.work.params
        takes = zip(params.feature_cols, model.inputs, self.input_shapes, strict=True)
        inputs = [input_of(batch[name], tensor, shape, name) for name, tensor, shape in takes]
        outputs = [str(place) for place in range(len(model.outputs))]
        labels_in_order = dict.fromkeys(params.label_cols, "")
        for name in class_labels(model.loss, labels_in_order, outputs):
            check_classes(np.asarray(batch[name]), name)
        shapes = params.label_shapes or self.output_shapes
        labels = [
            _label(batch[name], shape)
            for name, shape in zip(params.label_cols, shapes, strict=True)
        ]
        found = [_one_or_all(inputs), _one_or_all(labels)]
        if params.sample_weight_col:
            weights = np.asarray(batch[params.sample_weight_col], np.float32).reshape(-1)
            found.append(_one_or_all([weights] * len(labels)))
        return tuple(found)


@contextmanager
def _as_raised(raised: list[SparkdlError]) -> Iterator[None]:
    try:
        yield
    except Exception:
        if raised:
            raise raised[0] from None
        raise


def _label(values: Any, shape: list[int]) -> Any:
    """Return labels in an output's shape; as they are if they are numbers of classes."""
    array = np.asarray(values)
    fits = array[:1].size == abs(int(np.prod(shape)))
    return batch_of(array, shape if fits else [-1, *array.shape[1:]])


def _one_or_all(values: list[Any]) -> Any:
    return tuple(values) if len(values) > 1 else values[0]


def _on_epoch_end(keras: Any, function: Callable[[], Any]) -> Any:
    return keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: function())


def _with_rate_of_one(keras: Any, model: Any, saver: Any, size: int) -> list[Any]:
    """Return callbacks that save models with the learning rate of one process.

    Another number of processes can thus continue the run.
    """
    if rate_of(model.optimizer) is None or size == 1:
        return [saver]
    kept: list[float] = []

    def divide() -> None:
        kept[:] = [rate_of(model.optimizer) or 0.0]
        model.optimizer.learning_rate = kept[0] / size

    def restore() -> None:
        model.optimizer.learning_rate = kept[0]

    return [_on_epoch_end(keras, divide), saver, _on_epoch_end(keras, restore)]


def _choose_gpu(hvd: Any, use_gpu: bool) -> None:
    import tensorflow as tf

    gpus = tf.config.list_physical_devices("GPU")
    if gpus and use_gpu:
        for gpu in gpus:
            tf.config.experimental.set_memory_growth(gpu, True)
        tf.config.set_visible_devices(gpus[hvd.local_rank()], "GPU")
    elif gpus:
        tf.config.set_visible_devices([], "GPU")
