"""A module of PyTorch on a node: made, trained by Lightning's `Trainer`, and returned.

It trains for `TorchEstimator` and `LightningEstimator`.

Runs in: child
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from sparkdl.core.errors import ConfigError, FrameworkMissingError
from sparkdl.core.files import left_folder
from sparkdl.feed.reader.batches import SAMPLE_WEIGHT
from sparkdl.lightning import TRAINERS, Checkpoint, DualBase, Environment, FeedDataModule
from sparkdl.ml.estimators.columns import (
    VALIDATION,
    Columns,
    Task,
    by_tensor,
    check_size,
    inputs_by_column,
    returned_model,
)
from sparkdl.ml.estimators.text_make import MakeText
from sparkdl.ml.estimators.torch_batch import (
    ACCURACY,
    Scores,
    accuracy,
    described,
    fitted_label,
    floats_as,
    loss_of,
    metrics_of,
    optimizer_of,
    target_of,
)
from sparkdl.ml.scoring.inputs import check_weights
from sparkdl.ml.scoring.source import ModelSource, Signature, Tensor
from sparkdl.ml.scoring.text import TextModel, TokenLoss
from sparkdl.ml.scoring.torch import (
    by_name,
    like_parameters,
    module_of,
    module_signature,
    plain,
    plain_within,
    save_module,
)
from sparkdl.ml.summary import History
from sparkdl.values.types import TEXT

if TYPE_CHECKING:
    import torch

    from sparkdl.ml.model_file import ModelFile
    from sparkdl.node.context import NodeContext

_log = logging.getLogger(__name__)
_SAMPLE_ROWS = 2
"""How many rows are run to learn a model's outputs."""


@dataclass(frozen=True, kw_only=True)
class ModuleTask(Task):
    """The training task that each node receives from `LightningEstimator`.

    Attributes:
        made: a pickled module, on a node where it is, or a function that makes one.
        shapes: column to the shape of its rows.
        trainer_args: of Lightning's `Trainer`.
    """

    made: ModelFile | ModelSource | Callable[[], Any]
    shapes: Mapping[str, Any] = field(default_factory=dict)
    trainer_args: Mapping[str, Any] = field(default_factory=dict)

    def with_made(self, source: ModelSource) -> ModuleTask:
        """Return the task for nodes, where the driver's model is `source`."""
        made = self.made
        given = replace(made, model=source) if isinstance(made, MakeText) else source
        return replace(self, made=given)

    def inputs_of(self, signature: Signature) -> dict[str, Tensor]:
        """Return the parameter of `forward` that each column feeds."""
        features = self.columns.features
        chosen = [tensor for tensor in signature.optional if tensor.name in features.values()]
        found = inputs_by_column(features, [*signature.inputs, *chosen])
        for column in found.keys() & self.shapes.keys():
            found[column] = replace(found[column], shape=(None, *self.shapes[column]))
        return found


@dataclass(frozen=True, kw_only=True)
class TorchTask(ModuleTask):
    """The training task that each node receives from `TorchEstimator`."""

    optimizer: Any = None
    loss: Any = None
    metrics: Any = None


def check_lightning() -> None:
    if find_spec("lightning") is None:
        raise FrameworkMissingError(
            "TorchEstimator needs Lightning, whose Trainer trains the model: pip install "
            "'sparkdl[torch]', here and on the executors"
        )


def train(task: ModuleTask, ctx: NodeContext) -> dict[str, Any]:
    """Fit the model, on several nodes under a strategy.

    Returns:
        `history`; and what `returned_model` does of the chief's module.

    Raises:
        ConfigError: if the model cannot be trained, or could not be returned; before any row.
        FrameworkMissingError: without Lightning.
    """
    if isinstance(task, TorchTask):
        check_lightning()
    from torch import load, nn
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    given = _made(task, ctx)
    module = plain(given)
    callbacks = task.made_callbacks()
    check_trainer_args(task.trainer_args, callbacks)
    if task.saves and any(getattr(each, "dirpath", "") is None for each in callbacks):
        raise ConfigError(
            "callbacks has a ModelCheckpoint without a dirpath, whose files a restart would not "
            "find: give it a folder that all nodes reach, or leave out checkpoint_dir"
        )
    if not isinstance(task, TorchTask):
        _home(module)
        # `nn.Module` itself has one, which only raises.
        if type(module).forward is nn.Module.forward:
            raise ConfigError(
                f"{type(module).__name__} has no forward, by which the trained model scores: "
                "define it"
            )
    inputs = task.inputs_of(module_signature(module))
    # Before the training, so that a module that cannot travel costs no epochs.
    file = left_folder() / f"{task.name}.pt"
    save_module(file, module)
    arrange, prefix = Arrange(task, inputs, module), ""
    scores: Scores = ""
    if isinstance(task, TorchTask):
        given = Steps(given, task, ctx.num_workers)
        scores, prefix = given.loss.scores, "module."
    notes = Notes(arrange, task, ctx)
    home = _home(plain(given))
    data = FeedDataModule(
        task.batch_size,
        validation=VALIDATION if task.validates else None,
        ctx=ctx,
        collate_fn=arrange,
        shuffle=task.shuffle,
        seed=task.seed or 0,
        sparse=task.sparse,
        tail="pad" if arrange.counts else "short",
    )
    # It would tell of devices, and give advice that a feed cannot follow.
    logging.getLogger(home.__name__).setLevel(logging.WARNING)
    warnings.simplefilter("ignore", home.utilities.warnings.PossibleUserWarning)
    trainer = home.Trainer(**_arguments(task, ctx, home, callbacks))
    # After the construction: the trainer would take `notes` for a checkpoint of its own.
    trainer.callbacks.append(notes)
    with TemporaryDirectory() as folder:
        for each in callbacks:
            if getattr(each, "dirpath", "") is None:
                each.dirpath = folder
        trainer.fit(given, data, ckpt_path=notes.path if task.saves else None)
        whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = get_model_state_dict(trainer.lightning_module, options=whole)  # by all nodes
        best = getattr(trainer.checkpoint_callback, "best_model_path", "")
        if best and ctx.is_chief:
            state = load(best, "cpu", weights_only=False)["state_dict"]
    if not ctx.is_chief:
        file.unlink()
        return {"history": notes.history}
    own = {name: value for name, value in state.items() if name.startswith(prefix)}
    module = _with_weights(file, {n.removeprefix(prefix): value for n, value in own.items()})
    signature = traced(module.eval(), arrange.sample, scores)
    save_module(file, module)
    return {**returned_model(file, signature, task, ctx), "history": notes.history}


def _with_weights(file: Path, state: Mapping[str, Any]) -> Any:
    """Return a new module: the trained one has hooks, and wrappers of the training."""
    module = plain_within(module_of(file))
    # Lightning's checkpoints name the wrappers of `torch.compile`.
    module.load_state_dict({n.replace("_orig_mod.", ""): value for n, value in state.items()})
    if isinstance(module, TextModel):
        module.end_training()
    return module


def _made(task: ModuleTask, ctx: NodeContext) -> Any:
    """Return the module: by the same random numbers on all nodes, which then have their own."""
    import torch

    if task.seed is not None:
        torch.manual_seed(task.seed)
    made = task.made
    module = module_of(made.given) if isinstance(made, ModelSource) else made()  # type: ignore[operator]
    if not isinstance(module, torch.nn.Module):
        raise ConfigError(
            f"the function that makes the model returned a {type(module).__name__}: must be a "
            "torch.nn.Module"
        )
    if task.seed is not None and ctx.rank:
        # Otherwise dropout would leave out the same places on all nodes.
        torch.manual_seed(task.seed + ctx.rank)
    return module


def _home(module: Any) -> Any:
    """Return the Lightning that a module is of: there are two names of it."""
    for name in TRAINERS:
        home = sys.modules.get(name)
        if home is not None and isinstance(module, home.LightningModule):
            return home
    raise ConfigError(
        f"the model is a {type(module).__name__}, and must be a LightningModule; use "
        "TorchEstimator for any other module"
    )


def check_trainer_args(given: Mapping[str, Any], callbacks: Any = ()) -> None:
    """Check arguments of Lightning's `Trainer`, and callbacks, against the feeds of a fit."""
    for name, value in given.items():
        if name in _REFUSED:
            raise ConfigError(f"trainer_args must leave out {name}={value!r}: {_REFUSED[name]}")
    for each in callbacks:
        if found := [kind.__name__ for kind in type(each).__mro__ if kind.__name__ in _READERS]:
            raise ConfigError(
                f"callbacks has a {found[0]}, which reads rows outside of the training's epochs, "
                "and the feed has no others: leave it out, or train it by launch, with its own "
                "data"
            )


_FEEDS = (
    "an epoch is one pass over the rows: fit(df.sample(…)) or fit(df.limit(…)) makes it shorter"
)
_VALIDATES = "the rows to validate with are fed once an epoch: leave it out"
_REFUSED: Mapping[str, str] = {
    **dict.fromkeys(("devices", "num_nodes"), "set num_workers of the estimator instead"),
    "max_epochs": "set epochs of the estimator instead",
    "callbacks": "set callbacks of the estimator instead",
    **dict.fromkeys(("limit_train_batches", "limit_val_batches", "overfit_batches"), _FEEDS),
    "fast_dev_run": _FEEDS,
    **dict.fromkeys(("val_check_interval", "num_sanity_val_steps"), _VALIDATES),
    "reload_dataloaders_every_n_epochs": "the loaders last for the whole feed",
}
"""Arguments that change when or how often rows are read, and advice."""
_READERS = ("BatchSizeFinder", "LearningRateFinder", "StochasticWeightAveraging")


def _arguments(
    task: ModuleTask, ctx: NodeContext, home: Any, callbacks: list[Any]
) -> dict[str, Any]:
    from torch import cuda

    return {
        "accelerator": "cuda" if cuda.is_available() else "cpu",
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": any(isinstance(e, home.callbacks.Checkpoint) for e in callbacks),
        "num_sanity_val_steps": 0,
        "strategy": "ddp" if ctx.num_workers > 1 else "auto",
        # The user's arguments win over those above, and not over those below, which nodes rely on.
        **task.trainer_args,
        "devices": 1,
        "num_nodes": ctx.num_workers,
        "max_epochs": task.epochs,
        "callbacks": callbacks,
        "plugins": [Environment(), *task.trainer_args.get("plugins", ())],
    }


class Arrange:
    """Makes `(features, label)` of a batch of columns, or `(features, label, weight)`.

    For `Steps` it makes `(inputs by name, labels by column, weight, rows)` of a padded batch: a
    node without rows takes part all the same, with a row that counts 0.

    Attributes:
        sample: the first rows of the model's inputs.
    """

    def __init__(self, task: ModuleTask, inputs: Mapping[str, Tensor], module: Any) -> None:
        self.columns, self.counts, self._inputs = task.columns, isinstance(task, TorchTask), inputs
        self._dtype = next((p.dtype for p in module.parameters() if p.is_floating_point()), None)
        self.sample: dict[str, Any] = {}

    def __call__(self, batch: dict[str, Any]) -> Any:
        rows = None
        if self.counts:
            rows = int((batch[SAMPLE_WEIGHT] > 0).sum())
            batch = {n: _first(values, max(rows, 1)) for n, values in batch.items()}
        # Floats come as the model's parameters are; so do several columns that make one input.
        tensors = {tensor.name: tensor for tensor in self._inputs.values()}
        x = {
            name: _input({each: batch[each] for each in columns}, tensors[name], self._dtype)
            for name, columns in by_tensor(self._inputs).items()
        }
        self.sample = self.sample or {name: _first(each, _SAMPLE_ROWS) for name, each in x.items()}
        weight = None
        if self.columns.weight is not None:
            weight = batch[self.columns.weight]
            check_weights(weight.numpy(), self.columns.weight)
            weight = weight.float()
        if rows is not None:
            return x, {name: batch[name] for name in self.columns.labels}, weight, rows
        features = x if len(x) > 1 else next(iter(x.values()))
        label = floats_as(self._dtype, labels_of(batch, self.columns))
        return (features, label) if weight is None else (features, label, weight)


def _first(values: Any, rows: int) -> Any:
    import torch

    if getattr(values, "layout", None) != torch.sparse_csr:
        return values[:rows]
    ends = values.crow_indices()[: rows + 1]
    parts = (ends, *(each[: ends[-1]] for each in (values.col_indices(), values.values())))
    return torch.sparse_csr_tensor(*parts, (len(ends) - 1, values.shape[1]))


def _input(columns: Mapping[str, Any], tensor: Tensor, dtype: Any) -> torch.Tensor | list[str]:
    (column, values), *others = columns.items()
    if tensor.dtype == TEXT and isinstance(values, list) and not others:
        return values
    for column, each in columns.items():
        if isinstance(each, list):
            raise ConfigError(
                f"column {column!r} holds text, of which PyTorch has no tensors. Index it first, "
                "for example with pyspark.ml.feature.StringIndexer; or annotate the parameter of "
                "forward: list[str]"
            )
    if others:
        values = stacked(columns.values()).to(dtype)
    if tensor.shape is not None:
        check_size(column, values[0].numel(), tensor)
        values = values.reshape(-1, *(n or 0 for n in tensor.shape[1:]))
    return like_parameters(values, dtype, "cpu")


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


class Steps(DualBase):
    """The `LightningModule` that a module is trained in.

    Attributes:
        loss: as it is applied to a batch.
        metrics: by name.
    """

    _packages = TRAINERS[:1]
    _base = ":LightningModule"
    # Lightning's own.
    log: Any
    device: Any
    trainer: Any

    def __init__(self, given: Any, task: TorchTask, world: int) -> None:
        import torch

        super().__init__()
        self.module, self._task, self._world = plain(given), task, world
        # In a list, because a compiled module would be a further module here.
        self._called = [given]
        self.loss, self.metrics = loss_of(task.loss), metrics_of(task.metrics)
        kept = [
            (n, each) for n, each in enumerate(self.metrics.values()) if hasattr(each, "compute")
        ]
        # Of torchmetrics: they have states, those of training and validation at once.
        copies = {f"{prefix}{n}": deepcopy(each) for prefix in ("", "val_") for n, each in kept}
        self.kept = torch.nn.ModuleDict(copies)

    def configure_optimizers(self) -> Any:
        return optimizer_of(self._task.optimizer, self.module.parameters())

    def on_fit_start(self) -> None:
        """Move what is no part of the module, like a loss with weights of the classes."""
        given: Any = (self.loss.call, self.loss.by_row)
        for each in given:
            if hasattr(each, "to"):
                each.to(self.device)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        import torch
        from torch.nn.modules.batchnorm import SyncBatchNorm, _BatchNorm

        rows, norms = batch[-1], []
        if rows < 2 <= (self._task.batch_size or 2):
            # A lone row has no variance: it takes the running statistics.
            norms = [m for m in self.module.modules() if isinstance(m, _BatchNorm) and m.training]
            norms = [norm for norm in norms if not isinstance(norm, SyncBatchNorm)]
        for norm in norms:
            norm.eval()
        loss, parts = self._measured(batch, "")
        for norm in norms:
            norm.train()
        if self._world == 1:
            return loss
        # A strategy takes the mean of the nodes' gradients, and nodes differ in rows, or tokens.
        total = torch.tensor(parts, device=self.device)
        torch.distributed.all_reduce(total)
        return loss * (parts * self._world / total.clamp(min=1.0)).to(loss.dtype)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._measured(batch, "val_")

    def _measured(self, batch: Any, prefix: str) -> tuple[torch.Tensor, float]:
        """Return the loss of a batch, and of how many parts it is the mean: rows, or tokens.

        Log it and the metrics, which Lightning averages by the parts.
        """
        import torch

        inputs, labels, weight, rows = batch
        count = len(next(iter(labels.values())))
        # Not compiled, because PyTorch would compile once more for a lone row.
        is_lone = count == 1 < (self._task.batch_size or 2)
        output = (self.module._call_impl if is_lone else self._called[0])(**inputs)
        parts = float(rows)
        if rows and isinstance(self._task.loss, TokenLoss):
            parts = self._task.loss.parts(output)
        _check_rows(output, inputs, count)
        columns = self._task.columns
        label = labels_of(labels, columns, output)
        label = fitted_label(self.loss, output, label, ", ".join(columns.labels))
        loss = self.loss.of(output, label, weight)
        found: dict[str, Any] = {"loss": loss.detach().double()}
        with torch.no_grad():
            for index, (name, metric) in enumerate(self.metrics.items()):
                if (key := f"{prefix}{index}") in self.kept:
                    found[name] = self.kept[key]
                    if rows:
                        found[name].update(output, target_of(self.loss, label))
                    continue
                is_own = metric == ACCURACY
                value = accuracy(self.loss, output, label) if is_own else metric(output, label)
                # A number, or an array of the rows' values, of PyTorch or NumPy.
                found[name] = torch.as_tensor(value, device=self.device).detach().double().mean()
        # A float, because Lightning would round the nodes' mean of whole numbers.
        kind = {"on_step": False, "on_epoch": True, "sync_dist": True, "batch_size": parts}
        for name, value in found.items():
            self.log(f"{prefix}{name}", value, **kind)
        return loss, parts


def _check_rows(output: Any, inputs: Mapping[str, Any], rows: int) -> None:
    if hasattr(output, "shape") and (not output.ndim or output.shape[0] != rows):
        taken = ", ".join(f"{name} {described(value)}" for name, value in inputs.items())
        raise ConfigError(
            f"the model made {described(output)} of {taken}: its first axis must be the "
            f"{rows} rows. Where a column holds one number in a row, input_shapes={{column: "
            "[1]} makes it [rows, 1]"
        )


class Notes(Checkpoint):
    """The callback that keeps the history, and saves after each epoch.

    A checkpoint to Lightning, which calls those last: all is logged by then.

    Attributes:
        history: metric to its values, one for each epoch; None for an epoch that logged none.
    """

    _base = ".callbacks:Checkpoint"

    def __init__(self, arrange: Arrange, task: ModuleTask, ctx: NodeContext) -> None:
        super().__init__(every_epochs=1, ctx=ctx)
        self.arrange, self._task = arrange, task
        self.history: History = {}
        self._stops = False
        self._logged: dict[str, Any] = {}

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Stop at once where the training has been stopped before a restart."""
        super().on_train_start(trainer, pl_module)
        trainer.should_stop = self._stops

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count the batch; a checkpoint has whole epochs alone."""
        self._batches += 1

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Record what was logged, print it, and save."""
        # Lightning keeps the last value of each metric: the same tensor where an epoch logs none.
        found, before = dict(trainer.callback_metrics), self._logged
        logs = {name: float(x) for name, x in found.items() if x is not before.get(name)}
        self._logged = found
        epochs = max(map(len, self.history.values()), default=0)
        for name in dict.fromkeys([*self.history, *logs]):
            self.history.setdefault(name, [None] * epochs).append(logs.get(name))
        if self._ctx.is_chief:
            text = " - ".join(f"{name}: {value:.4g}" for name, value in sorted(logs.items()))
            sys.stdout.write(f"Epoch {trainer.current_epoch + 1}/{self._task.epochs} - {text}\n")
            sys.stdout.flush()
        # All nodes stop, or none: one that stopped alone would leave the others in a collective.
        trainer.should_stop = self._stops = any(self._ctx.all_gather(bool(trainer.should_stop)))
        if self._task.saves:
            super().on_train_epoch_end(trainer, pl_module)

    def state_dict(self) -> dict[str, Any]:
        return {"history": self.history, "stops": self._stops, "sample": self.arrange.sample}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.history, self._stops = state_dict["history"], state_dict["stops"]
        self.arrange.sample = state_dict["sample"]


def traced(module: Any, sample: Mapping[str, torch.Tensor], scores: Scores) -> Signature:
    """Return a module's inputs and outputs, found by running it on some rows.

    Outputs are unknown without a sample, or if the run fails: the model is trained by then.
    """
    import torch

    signature = module_signature(module)
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


def _output(name: str, value: torch.Tensor | list[str], rows: int) -> Tensor:
    if isinstance(value, list):
        return Tensor(name, TEXT, (None,))
    dims = tuple(value.shape)
    dtype = str(value.dtype).removeprefix("torch.")
    shape = (None, *dims[1:]) if dims[:1] == (rows,) else dims
    return Tensor(name, "float32" if dtype == "bfloat16" else dtype, shape)


def _scored(output: Tensor, values: torch.Tensor, scores: Scores) -> Tensor:
    """Return an only output that knows whether it scores classes."""
    is_float = output.dtype != TEXT and values.is_floating_point()
    if not is_float or output.shape is None or values.ndim > 2:
        return output
    if values.ndim < 2 or values.shape[1] < 2:
        return replace(output, is_softmax=scores == "sigmoid", is_logits=scores == "logit")
    # By the values, because a module of PyTorch does not say what its last layer is.
    is_whole = bool((values >= 0).all()) and bool(((values.sum(1) - 1).abs() < 1e-3).all())
    return replace(output, is_softmax=is_whole, is_logits=scores == "logits" and not is_whole)
