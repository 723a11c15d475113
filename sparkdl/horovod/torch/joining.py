"""`hvd.join`: processes whose data has ended wait for the others, which train on.

Runs in: child
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary, ref

from sparkdl.collectives.base import Group
from sparkdl.collectives.gloo import GlooGroup
from sparkdl.core.errors import ConfigError
from sparkdl.horovod.common.process_sets import ProcessSet, group_of

if TYPE_CHECKING:
    from sparkdl.horovod.torch.reducer import Reducer

_OPTIMIZERS: WeakKeyDictionary[Group, list[tuple[GlooGroup, ref[Reducer]]]] = WeakKeyDictionary()
"""Of each group of a process set, the optimizers in it, with their own groups."""


def remember(process_set: ProcessSet, group: Group, reducer: Reducer) -> None:
    """Let `join` know of an optimizer, and of the group in which it reduces."""
    assert isinstance(group, GlooGroup)
    _OPTIMIZERS.setdefault(group_of(process_set), []).append((group, ref(reducer)))


def join(device: int = -1) -> int:
    """Wait until all processes have called this; take part with zeros in what they reduce.

    For processes that have different numbers of batches: who has none left calls this, and the
    others train on. Averages are over all processes, those that have joined as zeros, as in
    Horovod. All processes must have made the same optimizers before.

    While nobody has joined this costs nothing beyond the 64 bytes in which processes tell each
    other what they are about to do, once for each step of an optimizer and each operation, beside
    the backward pass: it is there that a process says that it has joined.

    Args:
        device: accepted for Horovod's sake.

    Returns:
        The rank of the process that called it last, the same on all.

    Raises:
        CollectiveError: if a process was lost. One that calls something else meanwhile than sums,
            averages and steps of optimizers gets it alone, and those that have joined wait on.
        ConfigError: if a process set's optimizer is there, which would wait for ever.
    """
    world = group_of()
    if len(_OPTIMIZERS) > (world in _OPTIMIZERS):
        raise ConfigError("hvd.join() with an optimizer of a process set: there is no join for it")
    mine = _OPTIMIZERS.get(world, [])
    for _, weak in mine:
        reducer = weak()
        if reducer is not None and not reducer.is_replaced:
            reducer.prepare_to_join()
    waits = [group.submit(group.tensors.join) for group, _ in mine]
    last = world.join()
    for wait in waits:
        wait.result()
    return last
