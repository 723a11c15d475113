"""A module of PyTorch on a node: made, in step with those of others, and returned.

Runs in: child
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from sparkdl.core.errors import ConfigError
from sparkdl.ml.estimators.columns import Columns, Task, by_tensor, check_size, inputs_by_column
from sparkdl.ml.estimators.torch_batch import Scores
from sparkdl.ml.scoring.inputs import check_weights
from sparkdl.ml.scoring.source import Signature, Tensor
from sparkdl.ml.scoring.torch import by_name, like_parameters, module_of
from sparkdl.ml.scoring.torch import module_signature as signature_of

if TYPE_CHECKING:
    import torch

    from sparkdl.node.context import NodeContext

_log = logging.getLogger(__name__)
SAMPLE_ROWS = 2
"""How many rows are run to learn a model's outputs."""


@dataclass(frozen=True, kw_only=True)
class ModuleTask(Task):
    """The training task that each node receives, with PyTorch or Lightning.

    Attributes:
        made: a pickled module, or a function that makes one.
        shapes: column to the shape of its rows.
        verbose: whether the chief prints a line an epoch.
    """

    made: bytes | Callable[[], Any]
    shapes: Mapping[str, Any] = field(default_factory=dict)
    strategy: str = "ddp"
    verbose: int = 0


def made(task: ModuleTask, ctx: NodeContext) -> Any:
    """Return the module: by the same random numbers on all nodes, which then have their own."""
    import torch

    if task.seed is not None:
        torch.manual_seed(task.seed)
    module = module_of(task.made) if isinstance(task.made, bytes) else task.made()
    if not isinstance(module, torch.nn.Module):
        raise ConfigError(
            f"the function that makes the model returned a {type(module).__name__}: must be a "
            "torch.nn.Module"
        )
    if task.seed is not None and ctx.rank:
        # Otherwise dropout would leave out the same places on all nodes.
        torch.manual_seed(task.seed + ctx.rank)
    return module


def inputs_of(signature: Signature, task: ModuleTask) -> dict[str, Tensor]:
    """Return the parameter of `forward` that each column feeds."""
    features = task.columns.features
    chosen = [tensor for tensor in signature.optional if tensor.name in features.values()]
    found = inputs_by_column(features, [*signature.inputs, *chosen])
    return {
        column: replace(tensor, shape=(None, *task.shapes[column]))
        if column in task.shapes
        else tensor
        for column, tensor in found.items()
    }


def arranged(
    batch: Mapping[str, Any], inputs: Mapping[str, Tensor], dtype: Any, device: Any
) -> dict[str, torch.Tensor]:
    """Return the columns of a batch as the parameters of `forward`, by name.

    Floats come as the model's parameters are; so do several columns that make one input.
    """
    tensors = {tensor.name: tensor for tensor in inputs.values()}
    return {
        name: _input({column: batch[column] for column in columns}, tensors[name], dtype, device)
        for name, columns in by_tensor(inputs).items()
    }


def _input(columns: Mapping[str, Any], tensor: Tensor, dtype: Any, device: Any) -> torch.Tensor:
    for column, each in columns.items():
        if isinstance(each, list):
            raise ConfigError(
                f"column {column!r} holds text, of which PyTorch has no tensors. Index it first, "
                "for example with pyspark.ml.feature.StringIndexer"
            )
    (column, values), *others = columns.items()
    if others:
        values = stacked(columns.values()).to(dtype)
    if tensor.shape is not None:
        check_size(column, values[0].numel(), tensor)
        values = values.reshape(-1, *(n or 0 for n in tensor.shape[1:]))
    return like_parameters(values, dtype, device)


def stacked(columns: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return columns of numbers as one tensor `[rows, columns]` of floats."""
    import torch

    return torch.stack([values.reshape(-1).double() for values in columns], dim=1)


def labels_of(batch: Mapping[str, Any], columns: Columns, output: Any = None) -> Any:
    """Return the labels of a batch: the column; or a dict, where columns name outputs.

    Several without names are `[rows, columns]`; a tuple for a model that gives several tensors.
    """
    if columns.has_plain_label:
        return batch[next(iter(columns.labels))]
    by_output: dict[str, list[Any]] = {}
    for column, name in columns.labels.items():
        by_output.setdefault(name, []).append(batch[column])
    if "" in by_output:
        several = isinstance(output, tuple | list | Mapping)
        return tuple(by_output[""]) if several else stacked(by_output[""])
    return {n: each[0] if len(each) == 1 else stacked(each) for n, each in by_output.items()}


def weights_of(batch: Mapping[str, Any], columns: Columns) -> torch.Tensor | None:
    """Return the weights of a batch's rows, float32; None if they have none."""
    if columns.weight is None:
        return None
    found = batch[columns.weight]
    check_weights(found.numpy(), columns.weight)
    weights: torch.Tensor = found.float()
    return weights


def broadcast(tensors: Iterable[torch.Tensor]) -> None:
    from torch import distributed

    for tensor in tensors:
        distributed.broadcast(tensor.detach(), 0)


def is_sharded(module: Any) -> bool:
    from torch.distributed.tensor import DTensor

    # `parameters()` would not show it: after a forward pass FSDP has whole ones there.
    return any(isinstance(each, DTensor) for each in module.state_dict().values())


def full_state(module: Any) -> dict[str, Any]:
    """Return weights and buffers on the CPU; of shards on the chief alone, and by all nodes."""
    if not is_sharded(module):
        return {name: _copied(value) for name, value in module.state_dict().items()}
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return dict(get_model_state_dict(module, options=options))


def _copied(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if hasattr(value, "detach") else value


def traced(module: Any, sample: Mapping[str, torch.Tensor], scores: Scores) -> Signature:
    """Return a module's inputs and outputs, found by running it on some rows.

    Outputs are unknown without a sample, or if the run fails: the model is trained by then.
    """
    import torch

    signature = signature_of(module)
    if not sample:
        return signature
    try:
        with torch.no_grad():
            outputs = by_name(module(**sample))
    except Exception as error:  # noqa: BLE001 (whatever the user's module raises)
        _log.warning(
            "The model's outputs are not known, because it cannot be run: %s. Declare them by "
            "output_types when scoring",
            error,
        )
        return signature
    rows = len(next(iter(sample.values())))
    found = tuple(_output(name, value, rows) for name, value in outputs.items())
    if len(found) == 1:
        (values,) = outputs.values()
        found = (_scored(found[0], values, scores),)
    return replace(signature, outputs=found)


def _output(name: str, value: torch.Tensor, rows: int) -> Tensor:
    dims = tuple(value.shape)
    dtype = str(value.dtype).removeprefix("torch.")
    shape = (None, *dims[1:]) if dims[:1] == (rows,) else dims
    return Tensor(name, "float32" if dtype == "bfloat16" else dtype, shape)


def _scored(output: Tensor, values: torch.Tensor, scores: Scores) -> Tensor:
    """Return an only output that knows whether it scores classes."""
    if not values.is_floating_point() or output.shape is None or values.ndim > 2:
        return output
    several = values.ndim == 2 and values.shape[1] > 1
    if not several:
        return replace(output, is_softmax=scores == "sigmoid", is_logits=scores == "logit")
    # By the values, because a module of PyTorch does not say what its last layer is.
    is_whole = bool((values >= 0).all()) and bool(((values.sum(1) - 1).abs() < 1e-3).all())
    return replace(output, is_softmax=is_whole, is_logits=scores == "logits" and not is_whole)
