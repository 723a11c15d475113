"""TensorFlowOnSpark's `pipeline`: `TFEstimator` and `TFModel` as stages of Spark ML.

Runs in: driver, feeder

It gives `sparkdl.ml` TensorFlowOnSpark's names; there is no logic here.
https://github.com/yahoo/TensorFlowOnSpark/blob/v2.2.5/tensorflowonspark/pipeline.py
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any

from sparkdl.core.errors import RemovedError
from sparkdl.ml.estimators.estimator import TFEstimator
from sparkdl.ml.estimators.namespace import Namespace
from sparkdl.ml.estimators.params import (
    HasBatchSize,
    HasClusterSize,
    HasEpochs,
    HasExportDir,
    HasGraceSecs,
    HasInputMapping,
    HasInputMode,
    HasMasterNode,
    HasModelDir,
    HasNumPS,
    HasOutputMapping,
    HasProtocol,
    HasReaders,
    HasSignatureDefKey,
    HasSteps,
    HasTagSet,
    HasTensorboard,
    HasTFRecordDir,
    TFParams,
)
from sparkdl.ml.estimators.table import TFTypeConverters
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


def single_node_env(args: Any) -> None:
    """Set `sys.argv` from an argv list, or from a namespace that has one.

    GPUs are those that Spark assigned to the task; nothing is searched for or waited for.
    """
    argv = args if isinstance(args, list) else getattr(args, "argv", None)
    if argv:
        sys.argv = list(argv)


def get_meta_graph_def(saved_model_dir: str, tag_set: str) -> Any:
    """Refuse: it is TensorFlow 1's.

    Raises:
        RemovedError: always; says what to write instead.
    """
    raise RemovedError(
        "get_meta_graph_def is for TensorFlow 1: tf.saved_model.load(saved_model_dir, "
        "tags=…).signatures tells a model's inputs and outputs"
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
