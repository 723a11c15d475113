"""TensorFlowOnSpark's `pipeline`: `TFEstimator` and `TFModel` as stages of Spark ML.

Runs in: driver, feeder

It gives `sparkdl.ml` TensorFlowOnSpark's names, and mix-ins of single parameters for stages of a
program's own.
https://github.com/yahoo/TensorFlowOnSpark/blob/v2.2.5/tensorflowonspark/pipeline.py
"""

from __future__ import annotations

from sparkdl.ml.estimators.estimator import TFEstimator
from sparkdl.ml.namespace import Namespace
from sparkdl.ml.params import HasParams, TFParams, TFTypeConverters
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
]


def _mixin(name: str, *params: str) -> type[HasParams]:
    """Return a class called `name` with these parameters, their setters and getters."""
    members = {"__module__": __name__, "__doc__": f"Has {' and '.join(params)}."}
    return type(name, (HasParams,), members, params=params)


HasBatchSize = _mixin("HasBatchSize", "batch_size")
HasClusterSize = _mixin("HasClusterSize", "cluster_size")
HasEpochs = _mixin("HasEpochs", "epochs")
HasGraceSecs = _mixin("HasGraceSecs", "grace_secs")
HasInputMapping = _mixin("HasInputMapping", "input_mapping")
HasInputMode = _mixin("HasInputMode", "input_mode")
HasMasterNode = _mixin("HasMasterNode", "master_node")
HasModelDir = _mixin("HasModelDir", "model_dir")
HasNumPS = _mixin("HasNumPS", "num_ps", "driver_ps_nodes")
HasOutputMapping = _mixin("HasOutputMapping", "output_mapping")
HasProtocol = _mixin("HasProtocol", "protocol")
HasReaders = _mixin("HasReaders", "readers")
HasSteps = _mixin("HasSteps", "steps")
HasTensorboard = _mixin("HasTensorboard", "tensorboard")
HasTFRecordDir = _mixin("HasTFRecordDir", "tfrecord_dir")
HasExportDir = _mixin("HasExportDir", "export_dir")
HasSignatureDefKey = _mixin("HasSignatureDefKey", "signature_def_key")
HasTagSet = _mixin("HasTagSet", "tag_set")
