"""Horovod's elastic training over sparkdl's restarts: `hvd.elastic` of all frameworks.

`state.commit()` is a checkpoint, written beside the training. When a node is lost, all nodes
restart, or fewer if `min_nodes` allows it: `run` restores the last commit and begins the training
function again. https://horovod.readthedocs.io/en/v0.28.1/elastic_include.html
"""

from __future__ import annotations

import copy
import functools
import logging
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import cloudpickle
import numpy as np

from sparkdl.core.errors import CheckpointError, ConfigError, SparkdlError
from sparkdl.core.namesakes import missing_name
from sparkdl.horovod.common.process_sets import group_of, horovod_state
from sparkdl.node.context import NodeContext, current

if TYPE_CHECKING:
    import torch

__all__ = [
    "ElasticSampler",
    "KerasState",
    "ObjectState",
    "TensorFlowKerasState",
    "TensorFlowState",
    "TorchState",
    "run",
]
_log = logging.getLogger(__name__)
_FILE = "horovod-state.pkl"

T = TypeVar("T")


def run(func: Callable[..., T]) -> Callable[..., T]:
    """Decorate the training function, whose first argument is the state.

    Before it calls the function, it restores the last commit into the state, if there is one, calls
    the state's reset callbacks if this is a restart, and broadcasts rank 0's state. A
    `HorovodInternalError` inside fails the node, and so leads to a restart, as `launch(…,
    max_restarts=…)` and `run_elastic(…, reset_limit=…)` allow. The end of the function, and an
    error in it, wait until the last commit is written.

    Raises:
        CheckpointError: if the last commit cannot be read, or was not one of `state.commit()`; or
            the last one of the function could not be written.
    """

    @functools.wraps(func)
    def wrapper(state: ObjectState, *args: Any, **kwargs: Any) -> T:
        ctx = current()
        horovod_state()  # which raises before hvd.init()
        if ctx is not None:
            # Before the reset callbacks, which may depend on what was restored.
            state._resume(ctx)
            if ctx.restarts:
                state.on_reset()
        state.sync()
        with nullcontext() if ctx is None else _last_commit_written(ctx):
            return func(state, *args, **kwargs)

    return wrapper


@contextmanager
def _last_commit_written(ctx: NodeContext) -> Iterator[None]:
    try:
        yield
    except Exception:
        with suppress(SparkdlError):  # the first error matters more
            ctx._checkpoints.await_in_flight()
        raise
    ctx._checkpoints.await_in_flight()


class ObjectState:
    """A state of objects, which are its attributes: a training restores them after a restart.

    Those with `state_dict` and `load_state_dict`, such as PyTorch's models, optimizers and
    schedulers, are kept by these; all others as they are.

    Args:
        bcast_object: accepted for compatibility with Horovod; objects go through the world's group.
        get_rank: likewise.
        kwargs: names and first values; anything that can be pickled.
    """

    def __init__(
        self,
        bcast_object: Callable[..., Any] | None = None,
        get_rank: Callable[[], int] | None = None,
        **kwargs: Any,
    ) -> None:
        self._reset_callbacks: list[Callable[[], Any]] = []
        self._commits = 0
        for name, value in kwargs.items():
            setattr(self, name, value)
        self._kept: dict[str, Any] = kwargs
        self.save()

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...
        def __setattr__(self, name: str, value: Any) -> None: ...

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], Any]]) -> None:
        """Register functions to call after a restart, before the state is synchronized.

        For what depends on the number of processes, such as the learning rate.
        """
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Call the reset callbacks."""
        for callback in self._reset_callbacks:
            callback()

    def commit(self) -> None:
        """Save the current state in a checkpoint; all processes call it, at the same step.

        The training continues while a copy is written: a restart resumes here once all processes
        have written, and from the commit before until then. The next commit waits for this one.
        Without `checkpoint_dir` it is kept only in memory, for `restore`.

        Raises:
            ConfigError: if a feed is read ahead, by tf.data or workers of a DataLoader.
            CheckpointError: if the commit before could not be written, or a process has not called
                it in time.
        """
        self.save()
        ctx = current()
        if ctx is None or ctx.checkpoint_dir is None:
            if not self._commits:
                _log.warning(
                    "state.commit() keeps the state only in memory, where a restart does not find "
                    "it: launch with checkpoint_dir, and max_restarts"
                )
            self._commits += 1
            return
        # Checkpoints are numbered on over restarts: a smaller number would not be the newest.
        self._commits = max(self._commits, ctx.last_checkpoint.step if ctx.last_checkpoint else 0)
        self._commits += 1
        with ctx.checkpoint_async(self._commits) as saving:
            if horovod_state().rank == 0:
                kept = cloudpickle.dumps(self._kept)
                saving.until(partial((saving.folder / _FILE).write_bytes, kept))

    def check_host_updates(self) -> None:
        """Do nothing: sparkdl adds nodes that come back, once a commit is written."""

    def save(self) -> None:
        """Keep copies of the objects in memory."""
        self._kept = {name: self._copied(name) for name in self._kept}

    def restore(self) -> None:
        """Restore the objects that `save` has copied."""
        for name, kept in self._kept.items():
            self._put(name, kept)

    def sync(self) -> None:
        """Copy the objects of rank 0 to all processes, and keep them."""
        self.save()
        self._kept = group_of().broadcast_object(self._kept)
        self.restore()

    def _resume(self, ctx: NodeContext) -> None:
        """Load the last commit, if there is one."""
        last = ctx.last_checkpoint
        if last is None:
            return
        path = last.folder / _FILE
        if not path.is_file():
            raise CheckpointError(
                f"{last.url} is no commit of hvd.elastic: {_FILE} is not in it. Choose a "
                "separate checkpoint_dir for this training"
            )
        self._commits = last.step
        kept = cloudpickle.loads(path.read_bytes())
        if unknown := [name for name in kept if name not in self._kept]:
            raise ConfigError(
                f"the last commit has the state of {unknown[0]!r}, but this {type(self).__name__} "
                f"keeps {[*self._kept]}: give it the same attributes, or choose another "
                "checkpoint_dir"
            )
        self._kept |= kept
        self.restore()

    def _copied(self, name: str) -> Any:
        """Return a copy of an object in the memory of the host."""
        value = getattr(self, name)
        return on_cpu(value.state_dict()) if _has_state(value) else copy.deepcopy(value)

    def _put(self, name: str, kept: Any) -> None:
        """Make an object what `_copied` has returned."""
        # A copy, because PyTorch's optimizers go on with the tensors that they are given.
        if _has_state(value := getattr(self, name)):
            value.load_state_dict(copy.deepcopy(kept))
        else:
            setattr(self, name, copy.deepcopy(kept))


def _has_state(value: Any) -> bool:
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def on_cpu(nest: Any) -> Any:
    """Return a copy of a nest of dicts, lists and tuples, with its tensors on the CPU.

    A GPU's memory holds them already.
    """
    import torch

    if isinstance(nest, dict):
        return {key: on_cpu(item) for key, item in nest.items()}
    if type(nest) in (list, tuple):
        return type(nest)(map(on_cpu, nest))
    is_tensor = isinstance(nest, torch.Tensor)
    return nest.detach().to("cpu", copy=True) if is_tensor else copy.deepcopy(nest)


class TorchState(ObjectState):
    """The state of a training with PyTorch.

    Args:
        model: kept by its `state_dict`.
        optimizer: likewise.
        kwargs: further attributes, see `ObjectState`.
    """

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(model=model, optimizer=optimizer, **kwargs)


class TensorFlowState(ObjectState):
    """The state of some variables, and plain objects.

    Args:
        variables: of TensorFlow or Keras.
        session: accepted for Horovod's sake.
        kwargs: names and first values of further attributes; anything that can be pickled.

    Raises:
        ConfigError: without variables.
    """

    def __init__(
        self, variables: Iterable[Any] | None = None, session: None = None, **kwargs: Any
    ) -> None:
        found = list(variables or ())
        if not found:
            raise ConfigError(
                "give TensorFlowState the variables to keep: TensorFlow 2 has no list of them all"
            )
        super().__init__(variables=found, **kwargs)

    def _copied(self, name: str) -> Any:
        if name != "variables":
            return super()._copied(name)
        return [np.array(variable) for variable in self.variables]

    def _put(self, name: str, kept: Any) -> None:
        if name != "variables":
            super()._put(name, kept)
            return
        own, found = ([tuple(each.shape) for each in values] for values in (self.variables, kept))
        if own != found:
            raise ConfigError(
                f"the last commit has variables of the shapes {found}, and this training {own}: "
                "choose another checkpoint_dir for another model"
            )
        for variable, value in zip(self.variables, kept, strict=True):
            variable.assign(value)


class TensorFlowKerasState(TensorFlowState):
    """The state of a model of Keras, its optimizer, and plain objects.

    Args:
        model: built.
        optimizer: the model's by default.
        backend: accepted for Horovod's sake.
        kwargs: names and first values of further attributes; anything that can be pickled.

    Raises:
        ConfigError: if the model has not been built.
    """

    def __init__(
        self, model: Any, optimizer: Any = None, backend: Any = None, **kwargs: Any
    ) -> None:
        from sparkdl.horovod.tensorflow.optimizer import build

        self.model = model
        self.optimizer = optimizer if optimizer is not None else getattr(model, "optimizer", None)
        if not model.built:
            raise ConfigError("the model is not built: call model.build(input_shape) before")
        variables = list(model.weights)
        if self.optimizer is not None:
            # Now, so that all processes have the same variables to restore and to broadcast.
            build(self.optimizer, model.trainable_variables)
            variables += self.optimizer.variables
        super().__init__(variables, **kwargs)


KerasState = TensorFlowKerasState


class ElasticSampler:
    """Gives each process its share of a data set's indices, and skips used ones.

    For `DataLoader(…, sampler=sampler)`. Put it into the `TorchState`, call `record_batch` after
    each batch, and `set_epoch` at the end of each epoch.

    Args:
        dataset: its length must not change.
        shuffle: whether the order is random, another one in each epoch.
        seed: of that order, the same on all processes.

    Attributes:
        epoch: as it was set last.
        processed_num: how many indices of this epoch all processes together have used.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_num = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch without any used rows.

        Call it at the end of an epoch rather than at the beginning of one: a restart begins within
        an epoch, whose used rows must not be forgotten.
        """
        self.epoch = epoch
        self.processed_num = 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Note that each process has used a batch of `batch_size` rows."""
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, int]:
        """Return epoch and progress."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where another sampler of this data set stopped."""
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Share out the epoch's remaining indices among the current processes."""
        self.num_replicas, self.rank = horovod_state().size, horovod_state().rank
        indices = list(range(len(self.dataset)))
        if self.shuffle:
            # By seed and epoch alone: all processes, and restarted ones, have the same order.
            random.Random(self.seed + self.epoch).shuffle(indices)
        self.remaining_indices = indices[self.processed_num :]
        self.num_samples = math.ceil(len(self.remaining_indices) / self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        """Return this process's indices; some come twice, so that all have the same number."""
        left = self.remaining_indices
        extra = self.total_size - len(left)
        if left and extra:
            left = left + (left * math.ceil(extra / len(left)))[:extra]
        return iter(left[self.rank : self.total_size : self.num_replicas])

    def __len__(self) -> int:
        return self.num_samples


class CommitState:
    """Commits the state every `batches_per_commit` batches, and at the end of each epoch.

    The commit is made before the next batch, when all callbacks have seen the last one: so the
    order of the callbacks does not matter.

    Args:
        state: of the training.
        batches_per_commit: each commit is a checkpoint, so not too few.

    Raises:
        ConfigError: if `batches_per_commit` is below 1.
    """

    def __init__(self, state: ObjectState, batches_per_commit: int = 1) -> None:
        super().__init__()
        if batches_per_commit < 1:
            raise ConfigError(f"batches_per_commit={batches_per_commit}: must be 1 or more")
        self.state = state
        self.batches_per_commit = batches_per_commit
        self._batches, self._is_due = 0, False

    def on_train_begin(self, logs: Any = None) -> None:
        self._batches, self._is_due = 0, False

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._commit()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._batches += 1
        self._is_due = self._is_due or self._batches % self.batches_per_commit == 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._commit()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._is_due = True

    def on_train_end(self, logs: Any = None) -> None:
        self._commit()

    def _commit(self) -> None:
        if self._is_due:
            self._is_due = False
            self.state.commit()


@functools.cache
def _commit_state_callback() -> type[Any]:
    import keras  # on first use

    bases = (CommitState, keras.callbacks.Callback)
    return type("CommitStateCallback", bases, {"__doc__": CommitState.__doc__})


def __getattr__(name: str) -> Any:
    if name == "CommitStateCallback":
        return _commit_state_callback()
    return missing_name(__name__, name)
