"""`TorchModel`: scores a DataFrame with a model of PyTorch.

Runs in: driver
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
from pyspark.sql import SparkSession
from pyspark.sql.types import StructType

from sparkdl.core.errors import ConfigError
from sparkdl.ml.persistence import Contents, read_path
from sparkdl.ml.scoring.columns import OutputColumn, declared_outputs, mapped_outputs
from sparkdl.ml.scoring.describe import signature_of
from sparkdl.ml.scoring.inputs import named
from sparkdl.ml.scoring.model import MODEL, NetworkModel, Parts
from sparkdl.ml.scoring.predict import SCORE_ROWS
from sparkdl.ml.scoring.source import (
    Format,
    ModelSource,
    Signature,
    source_of_content,
    torch_source,
)
from sparkdl.ml.scoring.torch import module_content, module_of, module_signature, plain


class TorchModel(NetworkModel, params=["model_path", "input_cols", "output_cols", "input_shapes"]):
    """Scores with a model of PyTorch: a file of `torch.export`, or a module.

    `input_cols` names the columns for the parameters of `forward`, in their order; or
    `input_mapping` those for parameters by name. `output_cols` names the columns for the outputs,
    in their order, or `output_mapping` for the keys of a dict. A file of `torch.export` (`.pt2`)
    contains the types of its outputs; otherwise `output_types` declares them, and without
    `output_cols` or `output_mapping` its columns are the outputs, in order. No Spark job runs.

    Columns of floats come as the dtype of the model's parameters, others as their own; in a `.pt2`
    as it was exported. Each Python worker of Spark loads the model once and keeps it until it is
    given another one; where GPUs are fewer than task slots, one process for each GPU does, see
    `setModelPer`.

    `TorchEstimator` and `LightningEstimator` return one that knows its outputs. Without any of
    these parameters it takes `features_col` and gives `prediction_col`, as `KerasModel` does.

    Args:
        model: the path of a saved model that driver and executors can read, or a
            `torch.nn.Module`, which travels to the executors by pickle as it is now, and without
            `torch.compile`.

    Raises:
        ConfigError: if the module cannot travel.
    """

    __module__ = "sparkdl"
    _content = b""
    _format: Format = "module"

    def __init__(self, model: Any = None) -> None:
        super().__init__()
        self._set_table_defaults(batch_size=SCORE_ROWS)
        if isinstance(model, str | Path):
            self.setModelPath(str(model))
        elif model is not None:
            self._content = module_content(plain(model))
            self._signature = module_signature(model)

    @classmethod
    def _of(cls, content: bytes, signature: Signature) -> TorchModel:
        """Return the model of a pickled module with known outputs."""
        model = cls()
        model._content, model._signature = content, signature
        return model

    def getModel(self) -> Any:
        """Return the module, on the CPU; a further one with each call.

        Raises:
            ConfigError: if the model is a file.
            FrameworkMissingError: if the driver has no PyTorch.
        """
        if not self._is_module():
            raise ConfigError(f"{self.uid} scores with a file, not with a module: load it yourself")
        return module_of(self._content)

    def _parts(self) -> Parts:
        source = self._source()
        args: Any = self._values()
        signature = self._signature if self._is_module() else signature_of(source)
        args.input_mapping = inputs = self._inputs(signature)
        known = {tensor.name for tensor in signature.inputs}
        # Parameters with a default are fed only if they are mapped.
        chosen = tuple(t for t in signature.optional if t.name in inputs.values())
        if unknown := set(inputs.values()) - known - {t.name for t in chosen}:
            raise ConfigError(
                f"input_mapping names the inputs {', '.join(map(repr, sorted(unknown)))}: must "
                f"name those of the model, which are {_names(signature)}"
            )
        shapes = self._shapes(inputs)
        taken = tuple(
            replace(t, shape=shapes[t.name]) if t.name in shapes else t
            for t in (*signature.inputs, *chosen)
        )
        # A fitted model knows its outputs, so Spark ML's usual columns do.
        is_plain = not (self.getOutputCols() or self.getOutputMapping())
        is_fitted = bool(self._is_module() and signature.outputs)
        outputs = self._outputs() if is_plain and is_fitted else self._mapped(signature)
        return source, Signature(taken, ()), args, outputs

    def _is_module(self) -> bool:
        return bool(self._content) and self._format == "module"

    def _source(self) -> ModelSource:
        if path := "" if self._is_module() else self.getModelPath():
            return torch_source(path)
        if self._content:
            return source_of_content(self._content, self._format)
        raise ConfigError(
            f"{self.uid} does not know its model: make it as TorchModel(module), or call "
            "setModelPath(path) with a file of torch.export.save"
        )

    def _inputs(self, signature: Signature) -> Mapping[str, str]:
        """Return column to input."""
        columns: list[str] = self.getInputCols()
        mapping: dict[str, str] = self.getInputMapping()
        names = [tensor.name for tensor in (*signature.inputs, *signature.optional)]
        if signature.outputs and self._is_module() and not (columns or mapping):
            return dict.fromkeys(named(self.getFeaturesCol()), self._only_input())
        if bool(columns) == bool(mapping):
            raise ConfigError(
                f"set either input_cols or input_mapping; the model's inputs are "
                f"{_names(signature)}: setInputCols([column, …]) in this order"
            )
        if not len(signature.inputs) <= len(columns or set(mapping.values())) <= len(names):
            raise ConfigError(
                f"{columns or mapping} must give each input of the model a column. Its inputs are "
                f"{_names(signature)}"
            )
        return mapping or dict(zip(columns, names, strict=False))

    def _shapes(self, inputs: Mapping[str, str]) -> dict[str, tuple[int | None, ...]]:
        """Return the shapes of inputs, by their names."""
        shapes: dict[str, list[int]] = self.getInputShapes()
        if unknown := shapes.keys() - inputs.keys():
            raise ConfigError(
                f"input_shapes names {', '.join(map(repr, sorted(unknown)))}: must name columns "
                f"of the inputs, which are {', '.join(inputs)}"
            )
        return {inputs[column]: (None, *shape) for column, shape in shapes.items()}

    def _mapped(self, signature: Signature) -> tuple[StructType, tuple[OutputColumn, ...]]:
        columns: list[str] = self.getOutputCols()
        mapping: dict[str, str] = self.getOutputMapping()
        types: dict[str, str] = self.getOutputTypes()
        if columns and mapping:
            raise ConfigError(
                f"output_cols={columns} and output_mapping={mapping}: set one, not both"
            )
        known = [tensor.name for tensor in signature.outputs]
        if not mapping:
            columns = columns or ([] if known else list(types))
            names = known or [f"output_{place}" for place in range(len(columns))]
            if len(columns) > len(names):
                raise ConfigError(
                    f"output_cols={columns} must have at most one column for each output of the "
                    f"model: {', '.join(map(str, signature.outputs))}"
                )
            mapping = dict(zip(names, columns, strict=False))
        if known:
            return mapped_outputs(mapping, types, signature)
        if not mapping:
            raise ConfigError(
                "the model does not name its outputs: declare their columns, for example "
                "setOutputTypes({'scores': 'array<float>'})"
            )
        return declared_outputs(mapping, types)

    def _extra(self) -> dict[str, Any]:
        return {**super()._extra(), "format": self._source().format}

    def _to_save(self) -> dict[str, Any]:
        return {name: value for name, value in super()._to_save().items() if name != "model_path"}

    def _contents(self, spark: SparkSession) -> Contents:
        source = self._source()
        return {MODEL: source.content or read_path(spark, source.path)}

    @classmethod
    def _restored(cls, contents: Contents, metadata: dict[str, Any]) -> TorchModel:
        model = cls._of(contents[MODEL], msgspec.json.decode(metadata["signature"], type=Signature))
        model._format = metadata["format"]
        model._set_summary(metadata)
        return model


def _names(signature: Signature) -> str:
    optional = [f"[{tensor.name}]" for tensor in signature.optional]
    return ", ".join([*map(str, signature.inputs), *optional]) or "unknown"
