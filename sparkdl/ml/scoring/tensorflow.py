"""Loads a saved model with TensorFlow."""

from __future__ import annotations

import io
import os
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import starmap
from pathlib import Path
from typing import Any

import numpy as np

from sparkdl.core.errors import ConfigError
from sparkdl.core.files import scratch_folder
from sparkdl.core.imports import advice_on_missing
from sparkdl.ml.scoring.keras_objects import layer_names, loaded, output_names
from sparkdl.ml.scoring.predictor import Predictor
from sparkdl.ml.scoring.share import Share
from sparkdl.ml.scoring.source import ModelSource, Signature, Tensor
from sparkdl.values.columns import is_csr, places
from sparkdl.values.ndarrays import Array

Specs = Iterable[tuple[str, Any]]
_DEFAULT_KEY = "serving_default"


def load_tensorflow(source: ModelSource, share: Share | None) -> Predictor:
    prepare_worker(share)
    if source.format == "saved_model":
        return _saved_model(source)
    check_backend()
    known = {}
    try:
        if source.objects:
            from sparkdl.ml.persistence import CODE, unpacked_code  # which imports Spark ML

            (known,) = unpacked_code({CODE: source.objects})
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"the model cannot be made: {error}. {advice_on_missing(error)}"
        ) from error
    return keras_predictor(loaded(source.given, known))


def check_backend() -> None:
    import keras

    if (found := keras.backend.backend()) != "tensorflow":
        raise ConfigError(
            f"Keras runs on {found}, and models of Keras are trained and scored on TensorFlow: set "
            "KERAS_BACKEND to tensorflow, and spark.executorEnv.KERAS_BACKEND"
        )


def keras_predictor(model: Any) -> Predictor:
    import tensorflow as tf

    if not (flat := getattr(model, "inputs", None)):
        raise ConfigError(
            f"the model {model.name!r} is a {type(model).__name__} without known inputs. "
            "Save it with model.export(folder), which makes a SavedModel with a signature"
        )
    names = layer_names(flat)
    struct = flat[0] if len(flat) == 1 else model.input
    specs = [
        (tf.SparseTensorSpec if t.sparse else tf.TensorSpec)((None, *t.shape[1:]), t.dtype)
        for t in flat
    ]

    @tf.function(input_signature=specs, autograph=False)  # type: ignore[untyped-decorator]
    def run(*tensors: Any) -> Any:
        # By identity, because the inputs may be nested, and `struct` holds the same tensors.
        given = {id(t): value for t, value in zip(flat, tensors, strict=True)}
        return model(tf.nest.map_structure(lambda t: given[id(t)], struct), training=False)

    # Traced here and not at the first rows, because its outputs are part of the signature.
    concrete = run.get_concrete_function()
    traced = concrete.structured_outputs
    found = list(traced.values()) if isinstance(traced, dict) else tf.nest.flatten(traced)
    outputs = list(traced) if isinstance(traced, dict) else output_names(model, len(found))

    def outputs_of(inputs: Mapping[str, Array]) -> dict[str, Any]:
        given = concrete(*(_given(inputs[n], spec) for n, spec in zip(names, specs, strict=True)))
        values = given.values() if isinstance(given, dict) else tf.nest.flatten(given)
        return dict(zip(outputs, values, strict=True))

    inputs = zip(names, specs, strict=True)
    return _predictor(inputs, zip(outputs, found, strict=True), outputs_of)


def _given(values: Any, spec: Any) -> Any:
    """Return an input as a model takes it, whether it is a `csr_array` or an array."""
    import tensorflow as tf

    if not isinstance(spec, tf.SparseTensorSpec):
        return tf.convert_to_tensor(values.toarray() if is_csr(values) else values, spec.dtype)
    if not is_csr(values):
        return tf.sparse.from_dense(values)
    return tf.SparseTensor(places(values), tf.cast(values.data, spec.dtype), values.shape)


def _saved_model(source: ModelSource) -> Predictor:
    import tensorflow as tf

    with scratch_folder() as folder:
        path = source.path
        if source.content is not None or Path(path).is_file():  # an archive of the folder
            with zipfile.ZipFile(io.BytesIO(source.content) if source.content else path) as file:
                file.extractall(folder)
            path = str(folder)
        model = tf.saved_model.load(path, list(source.tag_set) or None)
    function = model.signatures[_signature_key(source, list(model.signatures))]
    inputs = function.structured_input_signature[1]
    outputs = function.structured_outputs

    def run(inputs: Mapping[str, Array]) -> dict[str, Any]:
        assert model is not None  # its variables live as long as the model
        return dict(function(**{name: tf.convert_to_tensor(x) for name, x in inputs.items()}))

    return _predictor(sorted(inputs.items()), sorted(outputs.items()), run)


def _predictor(inputs: Specs, outputs: Specs, run: Callable[..., dict[str, Any]]) -> Predictor:
    signature = Signature(tuple(starmap(_tensor, inputs)), tuple(starmap(_tensor, outputs)))
    return Predictor(signature, run, _numpy)


def _signature_key(source: ModelSource, keys: Sequence[str]) -> str:
    only = keys[0] if len(keys) == 1 else _DEFAULT_KEY
    key = source.signature_def_key or only
    if key not in keys:
        raise ConfigError(
            f"the SavedModel {source.path} has no signature {key!r}; it has "
            f"{', '.join(map(repr, sorted(keys))) or 'none'}: call setSignatureDefKey(…) with one "
            "of them"
        )
    return key


def _tensor(name: str, spec: Any) -> Tensor:
    import tensorflow as tf

    dtype = tf.as_dtype(spec.dtype)
    name_of = "float32" if dtype == tf.bfloat16 else dtype.name
    shape = spec.shape
    # Iterating over a shape of unknown rank would raise.
    is_known = not isinstance(shape, tf.TensorShape) or shape.rank is not None
    return Tensor(name, name_of, tuple(shape) if is_known else None)


def _numpy(tensor: Any) -> Array:
    import tensorflow as tf

    # numpy has no bfloat16, and float32 holds each of its values.
    values: Array = (tf.cast(tensor, tf.float32) if tensor.dtype == tf.bfloat16 else tensor).numpy()
    return np.asarray(values)


def prepare_worker(share: Share | None) -> None:
    """Take as many threads as a share has cores, its own GPUs, no more memory than needed.

    TensorFlow takes all cores and all memory of all GPUs otherwise, in each of Spark's workers. Its
    level of logging is 2, unless `TF_CPP_MIN_LOG_LEVEL` is set.
    """
    # Before the import, at which TensorFlow reads it.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    if share is None:
        return
    import tensorflow as tf

    gpus = tf.config.list_physical_devices("GPU")
    mine = [gpu for index, gpu in enumerate(gpus) if str(index) in (share.gpus or ())]
    with suppress(RuntimeError):  # a user's function has run TensorFlow in this worker before
        tf.config.threading.set_intra_op_parallelism_threads(share.cores)
        tf.config.threading.set_inter_op_parallelism_threads(1)
        if mine:
            tf.config.set_visible_devices(mine, "GPU")
        for gpu in mine or gpus:
            tf.config.experimental.set_memory_growth(gpu, True)
