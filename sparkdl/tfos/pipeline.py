"""TensorFlowOnSpark's `pipeline`: `TFEstimator` and `TFModel` as stages of Spark ML.

Runs in: driver, feeder

It gives `sparkdl.ml` TensorFlowOnSpark's names, and mix-ins of single parameters for stages of a
program's own.
https://github.com/yahoo/TensorFlowOnSpark/blob/v2.2.5/tensorflowonspark/pipeline.py
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any

from sparkdl.core.errors import RemovedError
from sparkdl.ml.estimators.estimator import TFEstimator
from sparkdl.ml.estimators.namespace import Namespace
from sparkdl.ml.estimators.params import HasParams, TFParams, TFTypeConverters
from sparkdl.ml.scoring.model import TFModel

__all__ = [
    "HasBatchSize",
    "HasClusterSize",
    "HasEpochs",
    "HasExportDir",
    "HasGraceSecs",
    "HasInputMapping",
    "HasInputMode",
    "HasMasterNode",
    "HasModelDir",
    "HasNumPS",
    "HasOutputMapping",
    "HasProtocol",
    "HasReaders",
    "HasSignatureDefKey",
    "HasSteps",
    "HasTFRecordDir",
    "HasTagSet",
    "HasTensorboard",
    "Namespace",
    "TFEstimator",
    "TFModel",
    "TFParams",
    "TFTypeConverters",
    "get_meta_graph_def",
    "single_node_env",
    "yield_batch",
]


class HasBatchSize(HasParams, params=["batch_size"]):
    """Has `batch_size`."""


class HasClusterSize(HasParams, params=["cluster_size"]):
    """Has `cluster_size`."""


class HasEpochs(HasParams, params=["epochs"]):
    """Has `epochs`."""


class HasGraceSecs(HasParams, params=["grace_secs"]):
    """Has `grace_secs`."""


class HasInputMapping(HasParams, params=["input_mapping"]):
    """Has `input_mapping`."""


class HasInputMode(HasParams, params=["input_mode"]):
    """Has `input_mode`."""


class HasMasterNode(HasParams, params=["master_node"]):
    """Has `master_node`."""


class HasModelDir(HasParams, params=["model_dir"]):
    """Has `model_dir`."""


class HasNumPS(HasParams, params=["num_ps", "driver_ps_nodes"]):
    """Has `num_ps` and `driver_ps_nodes`."""


class HasOutputMapping(HasParams, params=["output_mapping"]):
    """Has `output_mapping`."""


class HasProtocol(HasParams, params=["protocol"]):
    """Has `protocol`."""


class HasReaders(HasParams, params=["readers"]):
    """Has `readers`."""


class HasSteps(HasParams, params=["steps"]):
    """Has `steps`."""


class HasTensorboard(HasParams, params=["tensorboard"]):
    """Has `tensorboard`."""


class HasTFRecordDir(HasParams, params=["tfrecord_dir"]):
    """Has `tfrecord_dir`."""


class HasExportDir(HasParams, params=["export_dir"]):
    """Has `export_dir`."""


class HasSignatureDefKey(HasParams, params=["signature_def_key"]):
    """Has `signature_def_key`."""


class HasTagSet(HasParams, params=["tag_set"]):
    """Has `tag_set`."""


def single_node_env(args: Any) -> None:
    """Set `sys.argv` from an argv list, or from a namespace that has one.

    The GPUs are the ones that Spark assigned to the task; this function neither searches nor waits.
    """
    argv = args if isinstance(args, list) else getattr(args, "argv", None)
    if argv:
        sys.argv = list(argv)


def get_meta_graph_def(saved_model_dir: str, tag_set: str) -> Any:
    """Raise `RemovedError`, which says what to write instead: it is TensorFlow 1's."""
    raise RemovedError(
        "get_meta_graph_def is for TensorFlow 1: tf.saved_model.load(saved_model_dir, "
        "tags=…).signatures has a model's inputs and outputs"
    )


def yield_batch(
    iterable: Iterable[Any], batch_size: int, num_tensors: int = 1
) -> Iterator[list[list[Any]]]:
    """Yield rows as `num_tensors` lists of up to `batch_size` values each; binary stays binary.

    Ends at a None, as it always has.
    """
    tensors: list[list[Any]] = [[] for _ in range(num_tensors)]
    for item in iterable:
        if item is None:
            break
        for place, values in enumerate(tensors):
            value = item[place]
            values.append(bytes(value) if isinstance(value, bytearray) else value)
        if len(tensors[0]) >= batch_size:
            yield tensors
            tensors = [[] for _ in range(num_tensors)]
    if tensors and tensors[0]:
        yield tensors
