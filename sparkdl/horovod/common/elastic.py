"""Horovod's elastic training over sparkdl's restarts: `run`, `State`, `ObjectState`.

`state.commit()` is a checkpoint. When a node is lost, all nodes restart, or fewer if `min_nodes`
allows it: `run` restores the last commit into the state, then calls the training function again
from its beginning. https://horovod.readthedocs.io/en/v0.28.1/elastic_include.html
"""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import cloudpickle

from sparkdl.core.errors import CheckpointError, ConfigError
from sparkdl.horovod.common.process_sets import group_of, place

if TYPE_CHECKING:
    from sparkdl.node.context import NodeContext

_log = logging.getLogger(__name__)
_FILE = "horovod-state.pkl"

T = TypeVar("T")


def run(func: Callable[..., T]) -> Callable[..., T]:
    """Decorate the training function, whose first argument is the state.

    Before it calls the function, it restores the last commit into the state, if there is one, calls
    the state's reset callbacks if this is a restart, and broadcasts rank 0's state. A
    `HorovodInternalError` inside fails the node, and so leads to a restart, as `launch(…,
    max_restarts=…)` and `run_elastic(…, reset_limit=…)` allow.

    Raises:
        CheckpointError: if the last commit cannot be read, or was not one of `state.commit()`.
    """

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> T:
        from sparkdl.node.context import current

        ctx = current()
        place()  # which raises before hvd.init()
        if ctx is not None:
            # Before the reset callbacks, which may depend on what was restored.
            state._resume(ctx)
            if ctx.restarts:
                state.on_reset()
        state.sync()
        return func(state, *args, **kwargs)

    return wrapper


class State:
    """The state that a training restores after a restart. Subclasses save and restore it.

    Args:
        bcast_object: accepted for compatibility with Horovod; objects go through the world's group.
        get_rank: likewise.
    """

    def __init__(
        self,
        bcast_object: Callable[..., Any] | None = None,
        get_rank: Callable[[], int] | None = None,
    ) -> None:
        self._reset_callbacks: list[Callable[[], Any]] = []
        self._commits = 0

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], Any]]) -> None:
        """Register functions to call after a restart, before the state is synchronized.

        For what depends on the number of processes, such as the learning rate.
        """
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Call the reset callbacks."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def reset(self) -> None:
        """Do what a subclass needs after a restart, before the callbacks."""

    def commit(self, batches: int | Mapping[str, int] | None = None) -> None:
        """Keep the state as it is now, in a checkpoint; all processes call it, at the same step.

        A restart resumes here. Without `checkpoint_dir` it is kept in memory alone, for `restore`.

        Args:
            batches: how many batches of the feed, or of each, the model has used since `map_fun`
                began; needed where tf.data or workers of a DataLoader read ahead. Not Horovod's.

        Raises:
            CheckpointError: if it could not be written, or a process has not called this in time.
        """
        from sparkdl.node.context import current

        self.save()
        ctx = current()
        if ctx is None or ctx.checkpoint_dir is None:
            if not self._commits:
                _log.warning(
                    "state.commit() keeps the state in memory alone, where a restart does not find "
                    "it: launch with checkpoint_dir, and max_restarts"
                )
            self._commits += 1
            return
        # Checkpoints are numbered on over restarts: a smaller number would not be the newest.
        self._commits = max(self._commits, ctx.last_checkpoint.step if ctx.last_checkpoint else 0)
        self._commits += 1
        with ctx.checkpoint(self._commits, batches) as folder:
            if place().rank == 0:
                (folder / _FILE).write_bytes(cloudpickle.dumps(self.snapshot()))

    def check_host_updates(self) -> None:
        """Do nothing: sparkdl takes in nodes that come, right after a commit."""

    def save(self) -> None:
        """Keep the state in memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Make the state what `save` has kept."""
        raise NotImplementedError

    def sync(self) -> None:
        """Make the state of all processes that of rank 0."""
        raise NotImplementedError

    def snapshot(self) -> Any:
        """Return what `save` has kept: anything that can be pickled, without the GPU's tensors.

        Raises:
            ConfigError: if a subclass does not say it.
        """
        raise ConfigError(
            f"{type(self).__name__} must define snapshot() and load_snapshot(), so that commit() "
            "can write it to a checkpoint; sparkdl restarts processes, whose memory is lost"
        )

    def load_snapshot(self, snapshot: Any) -> None:
        """Make the state, and what `save` has kept, what `snapshot` had returned."""
        raise ConfigError(f"{type(self).__name__} must define load_snapshot(), see snapshot()")

    def _resume(self, ctx: NodeContext) -> None:
        """Load the last commit, if there is one."""
        last = ctx.last_checkpoint
        if last is None:
            return
        path = last.folder / _FILE
        if not path.is_file():
            raise CheckpointError(
                f"{last.url} is no commit of hvd.elastic: {_FILE} is not in it. Choose a "
                "checkpoint_dir of its own for this training"
            )
        self._commits = last.step
        self.load_snapshot(cloudpickle.loads(path.read_bytes()))


class ObjectState(State):
    """A state of plain objects, which are its attributes.

    A subclass for a framework says how its objects are kept: `_copied`, `_put`, `_synced`.

    Args:
        bcast_object, get_rank: accepted for Horovod's sake, see `State`.
        kwargs: names and first values; anything that can be pickled.
    """

    def __init__(
        self,
        bcast_object: Callable[..., Any] | None = None,
        get_rank: Callable[[], int] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(bcast_object, get_rank)
        for name, value in kwargs.items():
            setattr(self, name, value)
        self._kept: dict[str, Any] = kwargs
        self.save()

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...
        def __setattr__(self, name: str, value: Any) -> None: ...

    def save(self) -> None:
        """Keep copies of the objects in memory."""
        self._kept = {name: self._copied(name) for name in self._kept}

    def restore(self) -> None:
        """Make the objects what `save` has kept."""
        for name, kept in self._kept.items():
            self._put(name, kept)

    def sync(self) -> None:
        """Make the objects of all processes those of rank 0, and keep them."""
        shared = {name for name in self._kept if self._synced(name)}
        self.save()
        rest = {name: kept for name, kept in self._kept.items() if name not in shared}
        for name, kept in group_of().broadcast_object(rest).items():
            self._kept[name] = kept
            self._put(name, kept)

    def snapshot(self) -> Any:
        """Return what `save` has kept."""
        return self._kept

    def load_snapshot(self, snapshot: Any) -> None:
        """Take the objects over.

        Raises:
            ConfigError: if one of them is not in this state.
        """
        if unknown := [name for name in snapshot if name not in self._kept]:
            raise ConfigError(
                f"the last commit has the state of {unknown[0]!r}, which this "
                f"{type(self).__name__} has not (it keeps {[*self._kept]}): give it the same "
                "attributes, or choose another checkpoint_dir"
            )
        self._kept |= snapshot
        self.restore()

    def _copied(self, name: str) -> Any:
        """Return a copy of an object in the memory of the host."""
        return copy.deepcopy(getattr(self, name))

    def _put(self, name: str, kept: Any) -> None:
        """Make an object what `_copied` has returned."""
        setattr(self, name, copy.deepcopy(kept))

    def _synced(self, name: str) -> bool:
        """Whether an object travels on its own; it is rank 0's then. Others are pickled."""
        return False
