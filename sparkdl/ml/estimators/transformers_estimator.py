"""`TransformersEstimator`: fine-tune a model of Hugging Face Transformers on a column of texts."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pyspark.sql import DataFrame, functions
from pyspark.sql.types import BooleanType, IntegralType, NumericType, StringType, StructField

from sparkdl.core.errors import ConfigError, FeedTypeError
from sparkdl.core.jobs import named_jobs
from sparkdl.ml.estimators.columns import Columns
from sparkdl.ml.estimators.text_make import Head, MakeText, adamw, check_lora, look_at
from sparkdl.ml.estimators.torch_batch import check_optimizer, metrics_of
from sparkdl.ml.estimators.torch_estimator import ModuleEstimator
from sparkdl.ml.estimators.torch_train import TorchTask, check_lightning
from sparkdl.ml.estimators.training import check_columns, column, null_advice
from sparkdl.ml.scoring.model import TorchModel
from sparkdl.ml.scoring.source import local_path
from sparkdl.ml.scoring.text import Kind, TokenLoss
from sparkdl.ml.scoring.torch import module_content

_MAX_CLASSES = 10_000
_UNUSED = ("features_col", "input_mapping", "input_shapes")
_LOSSES = {"classification": "CrossEntropyLoss", "regression": "MSELoss", "language": TokenLoss()}


@dataclass(frozen=True)
class _Labels:
    """What a label column asks of a model: its kind, classes, and their labels if these are text.

    Attributes:
        classes: as in `MakeText`.
    """

    kind: Kind
    classes: int | None = None
    names: tuple[str, ...] = ()


class TransformersEstimator(
    ModuleEstimator, params=["text_col", "tokenizer", "max_length", "lora", "optimizer", "metrics"]
):
    """Fine-tunes a model of Transformers on a column of texts, on nodes that train in step.

    `TransformersEstimator("/models/bert", text_col="review", label_col="stars").fit(df)` returns a
    `TorchModel`. The nodes tokenise, and pad each batch to its longest text. The label column's
    type chooses what is learnt: whole numbers, booleans, text, or an output of `StringIndexer` are
    classes; other numbers are a regression; without `label_col` the model learns to continue the
    texts. Otherwise it trains as `TorchEstimator`, whose parameters it has but for `loss`.

    Args:
        model: a folder that `save_pretrained` wrote, which driver and nodes can read; a config, for
            new weights; a model; or a function without arguments that makes a model, or a model and
            its tokenizer, on each node.
        callbacks: of Lightning, as for `TorchEstimator`.
        params: parameters by name. `optimizer` is AdamW at a rate of 5e-5 if it is not set.

    Raises:
        ConfigError: if `model` is none of them, or a parameter is unknown or its value invalid; by
            `fit`, before nodes start, if columns, folder or head do not fit.
        FrameworkMissingError: by `fit`, without Lightning, Transformers, or peft for `lora`.
    """

    __module__ = "sparkdl"
    _defaults = MappingProxyType({"label_col": None, "optimizer": None})
    _own = ("_head",)
    _head: Head | None = None
    """That of a model that was given as such."""

    def setModel(self, model: Any) -> Any:
        """Set the model: a folder, a config, a model, or a function that makes it on each node.

        Raises:
            ConfigError: if it is none of them, or cannot travel to the nodes.
        """
        library: Any = sys.modules.get("transformers")  # without it, it can be none of its objects
        self._head = None
        if isinstance(model, str | Path):
            path = local_path(str(model))
            self._made = path if ":/" in path else os.path.abspath(path)
        elif library is not None and isinstance(model, library.PretrainedConfig):
            self._made = model
        elif library is not None and isinstance(model, library.PreTrainedModel):
            self._head = Head.of(type(model).__name__, model.config.id2label)
            self._made = module_content(model, "Give a function that makes it on each node")
        elif callable(model) and not hasattr(model, "state_dict"):
            self._made = model
        else:
            raise ConfigError(
                f"model is a {type(model).__name__}; give a folder, or a config or model of "
                "Transformers, or a function without arguments that makes a model"
            )
        return self

    def _columns(self) -> Columns:
        text, label = self.getTextCol(), self.getLabelCol()
        # Without labels, the texts are what is learnt.
        return Columns({text: "text"}, {label or text: ""}, self.getWeightCol())

    def _fitted(self, dataset: DataFrame) -> TorchModel:
        self._check_made()
        self._check_params()
        check_columns(dataset.columns, self._columns().names)
        kind = dataset.schema[self.getTextCol()].dataType
        if not isinstance(kind, StringType):
            raise ConfigError(
                f"text_col={self.getTextCol()!r} is of type {kind.simpleString()}: must be a "
                "string; cast it, or name another column"
            )
        labels = self._labels(dataset)
        if labels.names:
            names, numbers = list(labels.names), list(range(len(labels.names)))
            by_name = functions.map_from_arrays(functions.lit(names), functions.lit(numbers))
            number = by_name[column(self.getLabelCol())]
            dataset = dataset.withColumn(self.getLabelCol(), number)
        model = self._fitted_by(self._text_task(labels), dataset)
        outputs = tuple(replace(each, classes=labels.names) for each in model._signature.outputs)
        model._signature = replace(model._signature, outputs=outputs)
        model.setFeaturesCol(self.getTextCol())
        return model

    def _check_params(self) -> None:
        if useless := [name for name in _UNUSED if self.isSet(name)]:
            raise ConfigError(
                f"TransformersEstimator cannot use {', '.join(useless)}: set text_col to the "
                "column of the texts"
            )
        label = self.getLabelCol()
        if label is not None and not isinstance(label, str):
            raise ConfigError(f"label_col={label!r}: must be one column, or None")
        if label is None and (self.getWeightCol() or self.getMetrics()):
            raise ConfigError(
                "weight_col and metrics need label_col: without it, the loss is a mean over tokens"
            )
        # Without PyTorch on the driver, the nodes check the rest.
        if find_spec("torch"):
            check_lightning()
            if self.getLora():
                check_lora()
        if "torch" in sys.modules:
            check_optimizer(self.getOptimizer() or adamw)
            metrics_of(self.getMetrics())

    def _text_task(self, labels: _Labels) -> TorchTask:
        made = MakeText(
            self._made,
            self.getTokenizer(),
            labels.kind,
            labels.classes,
            labels.names,
            self.getLora(),
            self.getMaxLength(),
        )
        return TorchTask(
            optimizer=self.getOptimizer() or adamw,
            loss=_LOSSES[labels.kind],
            metrics=self.getMetrics(),
            **{**self._task_fields(), "made": made},
        )

    def _labels(self, dataset: DataFrame) -> _Labels:
        """Return what the labels are; a job reads those of classes."""
        head, name = self._classes(), self.getLabelCol()
        if name is None:
            return _Labels("language")
        field = dataset.schema[name]
        if isinstance(field.dataType, StringType):
            return _named(field, head, self._distinct(dataset, field))
        nominal = field.metadata.get("ml_attr", {}).get("type") in ("nominal", "binary")
        if nominal or isinstance(field.dataType, BooleanType | IntegralType):
            return _numbered(field, head, self._range(dataset, field))
        if not isinstance(field.dataType, NumericType):
            raise ConfigError(
                f"label_col={name!r} is of type {field.dataType.simpleString()}: must be whole "
                "numbers, booleans or text for classes, other numbers for a regression; cast it"
            )
        if head is not None and len(head) != 1:
            raise ConfigError(
                f"label_col={name!r} is of type {field.dataType.simpleString()}, which makes a "
                f"regression, and the model's head has {len(head)} classes: cast the column to "
                "int, or give a model without a head"
            )
        return _Labels("regression", 1)

    def _classes(self) -> tuple[str, ...] | None:
        """Return the classes of the model's head; None if it is new, or nodes find out.

        Raises:
            ConfigError: if the folder or the model is of no use.
        """
        head, label = self._head, self.getLabelCol()
        if isinstance(self._made, str):
            head = look_at(self._made, self.getTokenizer() is not None)
        if head is not None and label is None and not head.is_causal:
            raise ConfigError(
                f"model is a {head.architecture}, and without label_col a …ForCausalLM is trained: "
                "set label_col, or give such a model"
            )
        if self._head is not None and label is not None and self._head.classes is None:
            raise ConfigError(
                f"label_col={label!r} needs a head for labels, and model is a "
                f"{self._head.architecture}: give a …ForSequenceClassification, or a folder, whose "
                "model gets a new head"
            )
        return head.classes if head is not None else None

    def _distinct(self, dataset: DataFrame, field: StructField) -> list[str]:
        with named_jobs(dataset.sparkSession, "sparkdl", "read the labels"):
            rows = dataset.select(column(field.name)).distinct().limit(_MAX_CLASSES + 1).collect()
        _check_labels(field, any(row[0] is None for row in rows), len(rows))
        return sorted(row[0] for row in rows)

    def _range(self, dataset: DataFrame, field: StructField) -> int:
        number = column(field.name).cast("double")
        wanted = [functions.min(number), functions.max(number), functions.count_if(number.isNull())]
        with named_jobs(dataset.sparkSession, "sparkdl", "read the labels"):
            ((least, most, nulls),) = dataset.agg(*wanted).collect()
        _check_labels(field, bool(nulls), int(most or 0) + 1)
        if (least or 0) < 0:
            raise ConfigError(
                f"label_col={field.name!r} holds {least:g}: numbers of classes must count from 0; "
                "cast it to double for a regression, or index it with StringIndexer"
            )
        return int(most or 0) + 1


def _check_labels(field: StructField, has_null: bool, classes: int) -> None:
    if has_null:
        raise FeedTypeError(null_advice(field.name))
    if classes > _MAX_CLASSES:
        raise ConfigError(
            f"label_col={field.name!r} has more than {_MAX_CLASSES} classes: cast it to double for "
            "a regression, or leave it out to learn the texts"
        )


def _numbered(field: StructField, head: tuple[str, ...] | None, classes: int) -> _Labels:
    if head is not None and classes > len(head):
        raise ConfigError(
            f"label_col={field.name!r} holds the class {classes - 1}, and the model's head has "
            f"{len(head)} classes: give a model without a head, which gets a new one"
        )
    return _Labels("classification", max(classes, 2) if head is None else len(head))


def _named(field: StructField, head: tuple[str, ...] | None, found: list[str]) -> _Labels:
    if head is not None and {*found} <= {*head}:
        return _Labels("classification", len(head), head)
    if head is not None and len(head) != len(found):
        raise ConfigError(
            f"label_col={field.name!r} holds {', '.join(map(repr, found[:10]))}, and the model's "
            f"head knows {', '.join(map(repr, head[:10]))}: rename the labels, or give a model "
            "without a head, which gets a new one"
        )
    if len(found) < 2:
        raise ConfigError(
            f"label_col={field.name!r} holds {len(found)} different texts: classes need at least 2"
        )
    return _Labels("classification", len(found), tuple(found))
