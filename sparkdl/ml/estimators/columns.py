"""Data that an estimator exchanges with each node: the task, columns, batches, epochs, the result.

Runs in: driver, child, feeder
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from sparkdl.control.values import MAX_VALUE_NBYTES
from sparkdl.core.errors import ConfigError
from sparkdl.feed.transfer.files import PIECE_NBYTES, SentFile, digest_of
from sparkdl.ml.scoring.source import Signature, Tensor, local_path
from sparkdl.storage.systems import locate, open_storage

if TYPE_CHECKING:
    from sparkdl.node.context import NodeContext

VALIDATION = "validation"
"""The feed of the validation rows."""
Callbacks = Sequence[Any] | Callable[[], Sequence[Any]]


@dataclass(frozen=True)
class Columns:
    """The columns that a model is trained with.

    Attributes:
        features: column to the model's input, of any name if it is the only one. Columns of
            numbers that name the same are the elements of its rows.
        labels: column to the model's output; all without a name for outputs in their order.
    """

    features: dict[str, str]
    labels: dict[str, str]
    weight: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        weight = [self.weight] if self.weight else []
        return tuple(dict.fromkeys([*self.features, *weight, *self.labels]))

    @property
    def has_plain_label(self) -> bool:
        """Whether the labels are one column, which the loss takes as it is."""
        return list(self.labels.values()) == [""]


@dataclass(frozen=True, kw_only=True)
class Task:
    """The training task that each node receives, for every framework.

    Attributes:
        sparse: the columns of features that stay sparse.
        model_dir: a shared folder for the model's file; without it the driver fetches the file.
        saves: after each epoch, to continue there after a failure.
        callbacks: the user's, or a function that makes them.
    """

    columns: Columns
    batch_size: int | None
    epochs: int
    name: str
    validates: bool = False
    shuffle: bool = False
    seed: int | None = None
    sparse: Sequence[str] = ()
    model_dir: str | None = None
    saves: bool = False
    callbacks: Callbacks = ()

    def made_callbacks(self) -> list[Any]:
        return list(self.callbacks() if callable(self.callbacks) else self.callbacks)


def inputs_by_column(features: Mapping[str, str], inputs: Sequence[Tensor]) -> dict[str, Tensor]:
    """Return the model's input that each column feeds; an only input may have any name."""
    if len(inputs) == len(set(features.values())) == 1:
        return dict.fromkeys(features, inputs[0])
    by_name = {tensor.name: tensor for tensor in inputs}
    if set(features.values()) == set(by_name):
        return {column: by_name[name] for column, name in features.items()}
    advice = ""
    if any(name.startswith("input_layer") for name in by_name):
        advice = (
            ". Keras numbers unnamed inputs differently in each process. Name each: "
            "keras.Input(…, name=…)"
        )
    raise ConfigError(
        f"the model has the inputs {', '.join(by_name)}, and input_mapping={dict(features)} must "
        f"give each of them a column: setInputMapping({{column: input, …}}){advice}"
    )


def outputs_by_column(labels: Mapping[str, str], outputs: Sequence[Tensor]) -> dict[str, Tensor]:
    """Return the model's output that each label column belongs to."""
    by_name = {tensor.name: tensor for tensor in outputs}
    if not any(labels.values()):
        if len(outputs) == 1:
            return dict.fromkeys(labels, outputs[0])
        if len(labels) == len(outputs):
            return dict(zip(labels, outputs, strict=True))
    if set(labels.values()) == set(by_name):
        return {column: by_name[name] for column, name in labels.items()}
    raise ConfigError(
        f"the model has the outputs {', '.join(by_name)}, and label_col={dict(labels)} must give "
        "each of them labels: setLabelCol([column, …]) in this order, or {column: output, …}"
    )


def by_tensor(columns: Mapping[str, Tensor]) -> dict[str, list[str]]:
    """Return the names of inputs or outputs with their columns, in their order."""
    found: dict[str, list[str]] = {}
    for column, tensor in columns.items():
        found.setdefault(tensor.name, []).append(column)
    return found


def check_size(column: str, size: int, tensor: Tensor) -> None:
    """Check how many values a row of a column holds."""
    dims = (tensor.shape or (None, None))[1:]
    if None not in dims and (wanted := prod(n or 0 for n in dims)) != size:
        raise ConfigError(
            f"column {column!r} holds {size} values in a row, and the model's input {tensor} takes "
            f"{wanted}"
        )


def returned_model(
    file: Path, signature: Signature, task: Task, ctx: NodeContext
) -> dict[str, Any]:
    """Return a trained model as the chief returns it.

    Args:
        file: in `left_folder`.

    Returns:
        `signature` as JSON, and `path` in the task's `model_dir`. Without one, `content` if it fits
        into the answer, which needs no further port, or `file`, which the driver fetches.
    """
    found: dict[str, Any] = {"signature": msgspec.json.encode(signature).decode()}
    nbytes = file.stat().st_size
    if task.model_dir is not None:
        found["path"] = path = f"{local_path(ctx.absolute_path(task.model_dir))}/{file.name}"
        storage, inner = locate(path)
        system = open_storage(storage)
        system.create_dir(inner.rpartition("/")[0])
        with file.open("rb") as source, system.open_output_stream(inner) as target:
            shutil.copyfileobj(source, target, PIECE_NBYTES)
    elif nbytes > MAX_VALUE_NBYTES * 9 // 10:
        sent = SentFile(file.name, nbytes, digest_of(file))
        return {**found, "file": msgspec.to_builtins(sent)}
    else:
        found["content"] = file.read_bytes()
    file.unlink()  # an agent stays while it has a file for the driver
    return found
