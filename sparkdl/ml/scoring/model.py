"""Models that score DataFrames: stages returned by `fit`, or made by hand.

Runs in: driver
"""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import partial
from typing import Any

import msgspec
from pyspark.ml.base import Model
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from sparkdl.core.errors import ConfigError
from sparkdl.ml.model_file import ModelFile
from sparkdl.ml.namespace import Namespace
from sparkdl.ml.params import COLUMNS, SCORING, HasParams, TFParams
from sparkdl.ml.persistence import CODE, Contents, Saved, copy_path, packed_code, unpacked_code
from sparkdl.ml.scoring.columns import OutputColumn, class_outputs, mapped_outputs
from sparkdl.ml.scoring.describe import signature_of
from sparkdl.ml.scoring.inputs import as_mapping, input_columns
from sparkdl.ml.scoring.keras_objects import Objects, loaded, registered
from sparkdl.ml.scoring.predict import SCORE_ROWS, scored
from sparkdl.ml.scoring.share import sharing_of
from sparkdl.ml.scoring.source import ModelSource, Signature, source_of, with_keys
from sparkdl.ml.scoring.task import Score
from sparkdl.ml.scoring.torch import module_of, module_signature, plain, save_module
from sparkdl.ml.summary import History, TrainingSummary
from sparkdl.values.types import TEXT

MODEL = "model"
"""The content of a saved stage that is its model."""
PROBABILITY = "probability"
"""The column of a softmax, where `probability_col` names none; Spark ML's own name for it."""
Parts = tuple[ModelSource, Signature, Any, tuple[StructType, tuple[OutputColumn, ...]]]


class FittedModel(Model, HasParams, Saved, params=["input_mapping", "batch_size", *SCORING]):
    _file: ModelFile | None = None
    """The model, unless it is in a folder that the executors can read."""
    _summary: TrainingSummary | None = None

    def _parts(self) -> Parts:
        raise NotImplementedError

    def _transform(self, dataset: DataFrame) -> DataFrame:
        source, signature, args, (results, columns) = self._parts()
        sparse = self.getSparse() if self.hasParam("sparse") else ()
        inputs = input_columns(args.input_mapping, signature, dataset.schema, sparse)
        model, file = self.uid, self._file
        if file is not None and source.path == str(file.path):
            found = file.source_for_tasks(dataset.sparkSession)
            source = replace(
                source, path=found.path, content=found.content, released=found.released
            )
        else:
            model = f"{self.uid} ({source.path})"
        invalid = self.getHandleInvalid()
        sharing = sharing_of(dataset.sparkSession, self.getModelPer())
        score = Score(source, model, inputs, columns, args.batch_size, invalid, sharing)
        return scored(dataset, score, results, self.getKeep(), self._named_by, file)

    def _named_by(self, _column: str) -> str:
        return "output_mapping"

    @property
    def hasSummary(self) -> bool:
        """Whether this model comes from a `fit` in this program, or was saved after one."""
        return self._summary is not None

    @property
    def summary(self) -> TrainingSummary:
        """The history, rows and time of the training.

        Raises:
            ConfigError: if there is none, see `hasSummary`.
        """
        if self._summary is None:
            raise ConfigError(
                f"{self.uid} has no summary, which only a `fit` makes: take the model that fit "
                "returned, or load one that was saved after a fit"
            )
        return self._summary

    @property
    def history(self) -> History:
        """Metric to its values, one for each epoch; None for an epoch without one."""
        return self.summary.history

    def _extra(self) -> dict[str, Any]:
        if self._summary is None:
            return {}
        return {"summary": asdict(replace(self._summary, results=()))}

    def _set_summary(self, metadata: dict[str, Any]) -> None:
        if "summary" in metadata:
            self._summary = msgspec.convert(metadata["summary"], TrainingSummary)


class TFModel(
    FittedModel, TFParams, params=["model_dir", "export_dir", "signature_def_key", "tag_set"]
):
    """Scores with a saved model: a SavedModel, or a `.keras` file.

    `input_mapping` names the column for each of the model's inputs, `output_mapping` the column
    for each output that is wanted; without it all outputs are there under their own names. A
    separate process loads the model to find its inputs and outputs; no Spark job runs.

    Each Python worker of Spark loads the model once and keeps it until it is given another one;
    where tasks share a GPU, one process for each GPU does, see `setModelPer`.

    Args:
        tf_args: arguments in the place of unset parameters of the same name.
    """

    __module__ = "sparkdl"

    def __init__(self, tf_args: Any = None) -> None:
        super().__init__()
        self.args = Namespace(tf_args)
        self._set_table_defaults()

    def _parts(self) -> Parts:
        args: Any = self.merge_args_params()
        source = _with_objects(self._chosen(args))
        signature = signature_of(source)
        outputs = mapped_outputs(args.output_mapping, args.output_types, signature)
        return source, signature, args, outputs

    def _chosen(self, args: Any) -> ModelSource:
        if path := args.export_dir or args.model_dir:
            return source_of(path, args.signature_def_key, args.tag_set)
        if self._file is None:
            raise ConfigError(
                f"{self.uid} does not know its model: call setExportDir(path) with a SavedModel's "
                "folder or a .keras file. In tf_args, export_dir does the same"
            )
        return with_keys(self._file.source, args.signature_def_key, args.tag_set)

    def _to_save(self) -> dict[str, Any]:
        merged = vars(self.merge_args_params())
        return {
            param.name: merged[param.name]
            for param in self.params
            if param.name not in ("export_dir", "model_dir")
            # Arguments of `tf_args` become parameters, because a loaded model has no `tf_args`.
            and (param in self._paramMap or merged[param.name] != self._defaultParamMap[param])
        }

    def _contents(self, spark: SparkSession) -> Contents:
        source = self._chosen(self.merge_args_params())
        return {MODEL: ModelFile(source.format, partial(copy_path, spark, source.path))}

    def _extra(self) -> dict[str, Any]:
        return {**super()._extra(), "format": self._chosen(self.merge_args_params()).format}

    @classmethod
    def _restored(cls, contents: Contents, metadata: dict[str, Any]) -> TFModel:
        model = cls()
        model._set_summary(metadata)
        model._file = ModelFile.moved(contents[MODEL], metadata["format"])
        return model


def _with_objects(source: ModelSource, objects: Objects | None = None) -> ModelSource:
    """Add what a `.keras` file may name: these, and what this program has registered with Keras."""
    found = {**registered(), **(objects or {})} if source.format == "keras" else {}
    return replace(source, objects=packed_code(found)[CODE]) if found else source


class NetworkModel(FittedModel, params=COLUMNS):
    """A model that an estimator made, with Spark ML's usual columns unless mappings are set.

    The model's output is the column `prediction_col`. If `probability_col` is set (or
    `raw_prediction_col`, for logits), that column holds the output as a vector, and
    `prediction_col` the number of the class with the highest score. `probability_col` defaults to
    `probability` for a single output that ends in a softmax, or that the loss takes as logits
    (their softmax is stored), unless `output_types` has a type for `prediction_col`. With
    `output_mapping`, its columns are there instead.
    """

    _signature = Signature((), ())

    def _known_file(self) -> ModelFile:
        if self._file is None:
            raise ConfigError(
                f"{self.uid} does not know its model: make it as TorchModel(module), or take the "
                "one that fit returned"
            )
        return self._file

    @property
    def inputs(self) -> tuple[str, ...]:
        """The names of the model's inputs."""
        return tuple(tensor.name for tensor in self._signature.inputs)

    @property
    def outputs(self) -> tuple[str, ...]:
        """The names of the model's outputs."""
        return tuple(tensor.name for tensor in self._signature.outputs)

    def _inputs(self) -> dict[str, str]:
        mapping: dict[str, str] = self.getInputMapping()
        if mapping:
            return mapping
        if len(self._signature.inputs) != 1:
            raise ConfigError(
                f"the model has the inputs {', '.join(self.inputs)}: setInputMapping({{column: "
                "input, …}) instead of features_col"
            )
        return dict.fromkeys(as_mapping(self.getFeaturesCol()), self.inputs[0])

    def _outputs(self) -> tuple[StructType, tuple[OutputColumn, ...]]:
        mapping, types = self.getOutputMapping(), self.getOutputTypes()
        if mapping or not self._signature.outputs:
            return mapped_outputs(mapping, types, self._signature)
        if len(self._signature.outputs) != 1:
            raise ConfigError(
                f"the model has the outputs {', '.join(self.outputs)}: setOutputMapping({{output: "
                "column, …}) instead of prediction_col"
            )
        (output,) = self._signature.outputs
        prediction, scores = self.getPredictionCol(), self.getProbabilityCol()
        logits = self.getRawPredictionCol()
        if output.is_logits and prediction not in types:
            return class_outputs(output, scores or PROBABILITY, prediction, 0, logits)
        if output.is_softmax and not logits and prediction not in types:
            scores = scores or PROBABILITY
        for column, complement in ((scores, 1), (logits, 0)):
            if column:
                return class_outputs(output, column, prediction, complement)
        if output.shape is not None and output.shape[1:] in ((), (1,)) and output.dtype != TEXT:
            # Spark ML's evaluators and stages expect a prediction that is a double.
            types = {prediction: "double", **types}
        return mapped_outputs({output.name: prediction}, types, self._signature)

    def _named_by(self, column: str) -> str:
        if self.getOutputMapping():
            return "output_mapping"
        if column == self.getPredictionCol():
            return "prediction_col"
        return "raw_prediction_col" if column == self.getRawPredictionCol() else "probability_col"

    def _extra(self) -> dict[str, Any]:
        signature = msgspec.json.encode(self._signature).decode()
        return {**super()._extra(), "signature": signature}


class KerasModel(NetworkModel):
    """A model trained by `KerasEstimator.fit`; see `NetworkModel` for its columns."""

    __module__ = "sparkdl"

    def __init__(
        self,
        file: ModelFile | None = None,
        signature: Signature | None = None,
        objects: Objects | None = None,
    ) -> None:
        super().__init__()
        self._file = file
        self._signature, self._objects = signature or Signature((), ()), dict(objects or {})
        self._set_table_defaults(batch_size=SCORE_ROWS)

    def getModel(self) -> Any:
        """Return a new copy of the trained Keras model, not compiled.

        Raises:
            FrameworkMissingError: if the driver has no Keras.
        """
        return loaded(self._known_file().path, self._objects)

    def _parts(self) -> Parts:
        args: Any = self._values()
        args.input_mapping = self._inputs()
        source = _with_objects(self._known_file().source, self._objects)
        return source, self._signature, args, self._outputs()

    def _contents(self, spark: SparkSession) -> Contents:
        code = packed_code(self._objects) if self._objects else {}
        return {MODEL: self._known_file(), **code}

    @classmethod
    def _restored(cls, contents: Contents, metadata: dict[str, Any]) -> KerasModel:
        (objects,) = unpacked_code(contents) if CODE in contents else ({},)
        signature = msgspec.json.decode(metadata["signature"], type=Signature)
        model = cls(ModelFile.moved(contents[MODEL], "keras"), signature, objects)
        model._set_summary(metadata)
        return model


class TorchModel(NetworkModel, params=["input_shapes"]):
    """Scores with a module of PyTorch.

    `input_mapping` names the column for each parameter of `forward`; for a single one
    `features_col` is enough. `output_types` declares a column for each output, in order; with
    `output_mapping`, for those that it names. No Spark job runs.

    Float columns are cast to the dtype of the model's parameters, others keep theirs. Each Python
    worker of Spark loads the model once and keeps it until it is given another one; where tasks
    share a GPU, one process for each GPU does, see `setModelPer`.

    `TorchEstimator` and `LightningEstimator` return one that knows its outputs: it gives
    `prediction_col`, as `KerasModel` does.

    Args:
        model: a `torch.nn.Module`, which travels to the executors by pickle as it is now, and
            without `torch.compile`.

    Raises:
        ConfigError: if the module cannot travel.
    """

    __module__ = "sparkdl"

    def __init__(self, model: Any = None) -> None:
        super().__init__()
        self._set_table_defaults(batch_size=SCORE_ROWS)
        if model is not None:
            self._file = ModelFile("module", partial(save_module, module=plain(model)))
            self._signature = module_signature(model)

    @classmethod
    def _of(cls, file: ModelFile, signature: Signature) -> TorchModel:
        """Return the model of a pickled module with known outputs."""
        model = cls()
        model._file, model._signature = file, signature
        return model

    def getModel(self) -> Any:
        """Return the module, on the CPU; a further one with each call.

        Raises:
            FrameworkMissingError: if the driver has no PyTorch.
        """
        return module_of(self._known_file().path)

    def _parts(self) -> Parts:
        file = self._known_file()
        args: Any = self._values()
        args.input_mapping = inputs = self._inputs()
        required, optional = self._signature.inputs, self._signature.optional
        wanted = {*inputs.values()}
        if unknown := wanted - {tensor.name for tensor in (*required, *optional)}:
            names = [*map(str, required), *(f"[{tensor.name}]" for tensor in optional)]
            raise ConfigError(
                f"input_mapping names the inputs {', '.join(map(repr, sorted(unknown)))}: must "
                f"name those of the model, which are {', '.join(names)}"
            )
        shapes: dict[str, list[int]] = self.getInputShapes()
        if strange := shapes.keys() - inputs.keys():
            raise ConfigError(
                f"input_shapes names {', '.join(map(repr, sorted(strange)))}: must name columns "
                f"of the inputs, which are {', '.join(inputs)}"
            )
        by_input = {inputs[column]: (None, *shape) for column, shape in shapes.items()}
        # Parameters with a default are fed only if they are mapped.
        taken = (*required, *(tensor for tensor in optional if tensor.name in wanted))
        shaped = tuple(replace(t, shape=by_input.get(t.name, t.shape)) for t in taken)
        return file.source, Signature(shaped, ()), args, self._outputs()

    def _contents(self, _spark: SparkSession) -> Contents:
        return {MODEL: self._known_file()}

    @classmethod
    def _restored(cls, contents: Contents, metadata: dict[str, Any]) -> TorchModel:
        signature = msgspec.json.decode(metadata["signature"], type=Signature)
        model = cls._of(ModelFile.moved(contents[MODEL], "module"), signature)
        model._set_summary(metadata)
        return model
