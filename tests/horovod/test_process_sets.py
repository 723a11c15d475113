"""Process sets as programs write them, in a process that is alone."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sparkdl.horovod import common
from sparkdl.horovod.common.process_sets import HostPlacement


@pytest.fixture
def alone() -> Iterator[None]:
    common.init()
    yield
    common.shutdown()


@pytest.mark.parametrize(
    "ranks", [[2, 0, 1], reversed(range(3)), {1, 0, 2}, np.arange(3), [np.int64(2), 1, 0]]
)
def test_ranks_are_any_iterable_of_whole_numbers(ranks: object) -> None:
    process_set = common.ProcessSet(ranks)
    assert process_set.ranks == [0, 1, 2]
    assert {type(rank) for rank in process_set.ranks} == {int}
    assert str(process_set) == "ProcessSet(process_set_id=None, ranks=[0, 1, 2], mpi_comm=None)"


@pytest.mark.parametrize("ranks", [3, "01", [0.0], [None], np.ones(2)])
def test_what_is_no_list_of_ranks_is_refused(ranks: object) -> None:
    with pytest.raises(ValueError, match=r"ProcessSet\(.*must be a list of ranks"):
        common.ProcessSet(ranks)


def test_set_has_no_size_before_it_is_added(alone: None) -> None:
    process_set = common.ProcessSet([0])
    assert (process_set.size(), process_set.rank(), process_set.included()) == (None, None, True)
    assert (common.global_process_set.size(), common.global_process_set.rank()) == (1, 0)
    assert not common.remove_process_set(process_set)


def test_duplicate_set_at_init_leaves_nothing_initialized() -> None:
    with pytest.raises(ValueError, match="Attempted to add a duplicate process set"):
        common.init(process_sets=[common.ProcessSet([0])])
    assert not common.is_initialized()


@pytest.mark.parametrize(
    ("rank", "local", "cross"),
    [(0, "0 of 2", "0 of 2"), (1, "0 of 1", "1 of 2"), (2, "1 of 2", "0 of 1")],
)
def test_variables_say_the_place_among_several_hosts(rank: int, local: str, cross: str) -> None:
    found = HostPlacement(rank, ("a", "b", "a")).variables
    wanted = {"": f"{rank} of 3", "LOCAL_": local, "CROSS_": cross}
    told = {e: f"{found[f'HOROVOD_{e}RANK']} of {found[f'HOROVOD_{e}SIZE']}" for e in wanted}
    assert told == wanted


def test_processes_with_gpus_of_their_own_count_as_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = SimpleNamespace(host="a")
    ctx: Any = SimpleNamespace(
        rank=1, member=trainer, world=SimpleNamespace(trainers=[trainer] * 2)
    )
    ctx.all_gather = lambda mine: [mine.replace("rank 1", "rank 0"), mine]
    for gpus, place in (("0", (0, [1], [0, 1])), ("0,1", (1, [0, 1], [1]))):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
        seat = HostPlacement.of(ctx)
        assert (seat.local_rank, seat.on_host, seat.across) == place
