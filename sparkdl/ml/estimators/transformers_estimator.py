"""`TransformersEstimator`: fine-tune a model of Hugging Face Transformers on a column of texts."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pyspark.sql import DataFrame, functions
from pyspark.sql.types import BooleanType, IntegralType, NumericType, StringType, StructField

from sparkdl.core.errors import ConfigError, FeedTypeError
from sparkdl.core.jobs import named_jobs
from sparkdl.driver.executors.scored import column
from sparkdl.ml.estimators.columns import Columns
from sparkdl.ml.estimators.text_make import Head, MakeText, adamw, check_lora, look_at_tokenizer
from sparkdl.ml.estimators.torch_batch import check_optimizer, metrics_of
from sparkdl.ml.estimators.torch_estimator import ModuleEstimator, module_file
from sparkdl.ml.estimators.torch_train import TorchTask, check_lightning
from sparkdl.ml.estimators.training import check_columns, null_advice
from sparkdl.ml.scoring.model import TorchModel
from sparkdl.ml.scoring.source import local_path
from sparkdl.ml.scoring.text import TokenLoss

_MAX_CLASSES = 10_000
_UNUSED = ("features_col", "input_mapping", "input_shapes", "sparse")
_LOSSES = {"classification": "CrossEntropyLoss", "regression": "MSELoss", "language": TokenLoss()}


class TransformersEstimator(
    ModuleEstimator, params=["text_col", "tokenizer", "max_length", "lora", "optimizer", "metrics"]
):
    """Fine-tunes a model of Transformers on a column of texts, on nodes that train in step.

    `TransformersEstimator("/models/bert", text_col="review", label_col="stars").fit(df)` returns a
    `TorchModel`. The nodes tokenise, and pad each batch to its longest text. The label column's
    type chooses what is learnt: whole numbers, booleans, text, or an output of `StringIndexer` are
    classes; other numbers are a regression; without `label_col` the model learns to continue the
    texts. Otherwise it trains as `TorchEstimator`, whose parameters it has except for `loss`.

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
        self._head, self._made = None, model
        if isinstance(model, str | Path):
            self._made = _path_of(model)
        elif library is not None and isinstance(model, library.PreTrainedModel):
            self._head = Head.of(type(model).__name__, model.config.id2label)
            self._made = module_file(model)
        elif not (library is not None and isinstance(model, library.PretrainedConfig)) and (
            not callable(model) or hasattr(model, "state_dict")
        ):
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
        text, label = self.getTextCol(), self.getLabelCol()
        kind = dataset.schema[text].dataType
        if not isinstance(kind, StringType):
            raise ConfigError(
                f"text_col={text!r} is of type {kind.simpleString()}: must be a string; cast it, "
                "or name another column"
            )
        made = self._maker(dataset)
        if made.names:  # nodes get numbers, whatever the labels
            numbers = functions.lit(list(range(len(made.names))))
            by_name = functions.map_from_arrays(functions.lit(list(made.names)), numbers)
            dataset = dataset.withColumn(label, by_name[column(label)])
        task = TorchTask(
            optimizer=self.getOptimizer() or adamw,
            loss=_LOSSES[made.kind],
            metrics=self.getMetrics(),
            **{**self._task_fields(), "made": made},
        )
        model = self._fitted_by(task, dataset)
        outputs = tuple(replace(each, classes=made.names) for each in model._signature.outputs)
        model._signature = replace(model._signature, outputs=outputs)
        model.setFeaturesCol(text)
        return model

    def _check_params(self) -> None:
        label = self.getLabelCol()
        if useless := [name for name in _UNUSED if self.isSet(name)]:
            raise ConfigError(
                f"TransformersEstimator cannot use {', '.join(useless)}: set text_col to the "
                "column of the texts"
            )
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
            check_optimizer(self.getOptimizer() or "AdamW")
            metrics_of(self.getMetrics())

    def _maker(self, dataset: DataFrame) -> MakeText:
        """Return what makes the model for the labels; a job reads those of classes."""
        given, name = self.getTokenizer(), self.getLabelCol()
        tokenizer = _path_of(given) if isinstance(given, str | Path) else given
        head = self._classes(name)
        if isinstance(folder := self._made if tokenizer is None else tokenizer, str):
            look_at_tokenizer(folder)
        made = MakeText(
            model=self._made,
            tokenizer=tokenizer,
            lora=self.getLora(),
            max_length=self.getMaxLength(),
        )
        if name is None:
            return made
        field = dataset.schema[name]
        kind = field.dataType
        nominal = field.metadata.get("ml_attr", {}).get("type") in ("nominal", "binary")
        if nominal or isinstance(kind, BooleanType | IntegralType | StringType):
            with named_jobs(dataset.sparkSession, "sparkdl", "read the labels"):
                rows = dataset.select(column(name)).distinct().limit(_MAX_CLASSES + 1).collect()
            classes, names = _classes_in([row[0] for row in rows], field, head)
            return replace(made, kind="classification", classes=classes, names=names)
        if not isinstance(kind, NumericType) or (head is not None and len(head) != 1):
            what = "" if head is None else f", and the model's head has {len(head)} classes"
            raise ConfigError(
                f"label_col={name!r} is of type {kind.simpleString()}{what}: must be whole "
                "numbers, booleans or text for classes; other numbers are a regression, which "
                "needs a head of one number, or a model without a head. Cast it"
            )
        return replace(made, kind="regression", classes=1)

    def _classes(self, label: str | None) -> tuple[str, ...] | None:
        """Return the classes of the model's head; None if it is new, or nodes find out.

        Raises:
            ConfigError: if the folder or the model is of no use.
        """
        head = self._head
        if isinstance(self._made, str):
            head = Head.in_folder(self._made)
        if head is None:
            return None
        # The model of a folder gets a new head for labels.
        if not head.is_causal if label is None else head is self._head and head.classes is None:
            wanted = "CausalLM" if label is None else "SequenceClassification"
            raise ConfigError(
                f"label_col={label!r} needs a …For{wanted}, and model is a {head.architecture}: "
                "give such a model, or change label_col"
            )
        return head.classes


def _path_of(given: str | Path) -> str:
    path = local_path(str(given))
    return path if ":/" in path else os.path.abspath(path)


def _classes_in(
    found: list[Any], field: StructField, head: tuple[str, ...] | None
) -> tuple[int, tuple[str, ...]]:
    """Return the size of the head for these labels, and their texts if they are such."""
    if None in found:
        raise FeedTypeError(null_advice(field.name))
    is_text = isinstance(field.dataType, StringType)
    known = range(_MAX_CLASSES)
    wrong = [each for each in found if each not in known] if not is_text else found[_MAX_CLASSES:]
    if wrong or (is_text and len(found) < 2):
        what = f"{wrong[0]!r}" if wrong and not is_text else f"{len(found)} different texts"
        raise ConfigError(
            f"label_col={field.name!r} holds {what}: classes must be 2 to {_MAX_CLASSES} texts, or "
            f"numbers from 0 to {_MAX_CLASSES - 1}. Index them with pyspark.ml.feature."
            "StringIndexer, or cast numbers to double for a regression"
        )
    names = tuple(sorted(found)) if is_text else ()
    if is_text and {*names} <= {*(head or ())}:
        names = head or ()
    classes = len(names) if is_text else int(max(found, default=0)) + 1
    if head is not None and (classes > len(head) or (is_text and classes != len(head))):
        shown = ", ".join(map(repr, names[:5])) if is_text else f"the class {classes - 1}"
        raise ConfigError(
            f"label_col={field.name!r} holds {shown}, and the model's head has the {len(head)} "
            f"classes {', '.join(map(repr, head[:5]))}: rename the labels, or give a model without "
            "a head, which gets a new one"
        )
    return max(2, classes, len(head or ())), names
