"""TensorFlowOnSpark's `compat`: what differs between versions of TensorFlow and Keras.

Runs in: child

https://github.com/yahoo/TensorFlowOnSpark/blob/v2.2.5/tensorflowonspark/compat.py
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sparkdl.core.files import scratch_folder
from sparkdl.ml.scoring.keras_objects import output_names

if TYPE_CHECKING:
    import tensorflow as tf

__all__ = ["disable_auto_shard", "export_saved_model", "is_gpu_available"]


def export_saved_model(model: Any, export_dir: str, is_chief: bool = False) -> None:
    """Export a model as a SavedModel, for inference.

    Call it on all nodes of a strategy: reading the variables takes all of them. Only the chief
    writes to `export_dir`. Outputs of a Keras model are called after their layers.

    Args:
        model: of Keras 3, of tf_keras, or a `tf.Module`.
        export_dir: a folder or a URL that TensorFlow can write.
        is_chief: whether this node's copy is the one that is kept.
    """
    if not is_chief:
        with scratch_folder() as private:
            _export(model, str(private / "model"))
        return
    _export(model, export_dir.removeprefix("file://"))


def disable_auto_shard(options: tf.data.Options) -> None:
    """Make `tf.distribute` use a dataset unsharded: each node feeds its own rows."""
    import tensorflow as tf

    policy = tf.data.experimental.AutoShardPolicy.OFF
    options.experimental_distribute.auto_shard_policy = policy


def is_gpu_available() -> bool:
    """Whether TensorFlow sees a GPU."""
    import tensorflow as tf

    return bool(tf.config.list_physical_devices("GPU"))


def _export(model: Any, folder: str) -> None:
    import tensorflow as tf

    libraries = {kind.__module__.partition(".")[0] for kind in type(model).__mro__}
    if "tf_keras" in libraries:
        model.save(folder, save_format="tf")
    elif "keras" in libraries:
        _with_named_outputs(model).export(folder, verbose=False)
    else:
        tf.saved_model.save(model, folder)


def _with_named_outputs(model: Any) -> Any:
    """Return a model whose outputs are named after their layers, as in Keras 2.

    Keras 3 numbers the outputs of an exported model unless they are a dict.
    """
    import keras

    outputs = getattr(model, "outputs", None)
    if not outputs or isinstance(getattr(model, "output", None), dict):
        return model  # a subclass has no known outputs; those of a dict have their names
    names = output_names(model, len(outputs))
    return keras.Model(model.inputs, dict(zip(names, outputs, strict=True)))
