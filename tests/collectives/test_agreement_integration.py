"""Whatever members call: what all call is right, what they do not is an error, and nobody hangs.

Programs are random: a common one, from which members deviate here and there, which they begin
beside one another or wait for, which they leave by `join` or by going away.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from sparkdl.core.options import Feeding
from sparkdl.node.context import NodeContext
from tests.doubles.labs import Lab, lab_of
from tests.horovod.together import together

pytestmark = pytest.mark.torch

SIZE = 3
_TIMEOUT_S = 60.0
OPS: dict[str, Callable[..., Any]] = {"sum": np.sum, "average": np.mean, "max": np.max}
REDUCES, SHARES, GATHERS, EXCHANGES, SENDS, WAITS, JOINS = (
    *("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "barrier", "join"),
)


@dataclass(frozen=True)
class Act:
    """What a member calls once.

    Attributes:
        rows: which may differ between members where rows are gathered or exchanged.
        is_beside: whether the member goes on meanwhile.
    """

    kind: str
    op: str = "sum"
    dtype: str = "float64"
    rows: int = 3
    root: int = 0
    name: str = ""
    is_beside: bool = False

    @property
    def agreed(self) -> tuple[Any, ...]:
        """All that must be the same on all members."""
        fields = {
            REDUCES: (self.op, self.dtype, self.name, self.rows),
            SHARES: (self.op, self.dtype, self.name, self.rows),
            GATHERS: (self.dtype, self.name),
            EXCHANGES: (self.dtype, self.name),
            SENDS: (self.dtype, self.name, self.rows, self.root),
        }
        return (self.kind, *fields.get(self.kind, ()))

    def given(self, rank: int, place: int) -> Any:
        """Return the member's array: whole numbers, so that all sums are exact."""
        count = self.rows * SIZE if self.kind == EXCHANGES else self.rows
        return (np.arange(count) * (rank + 2) - 7 * place - rank * rank).astype(self.dtype)


Program = tuple[Act, ...]


@dataclass(frozen=True)
class Play:
    """The programs of all members, by rank; each ends with `join`.

    Attributes:
        gone: the member that goes away, and after how many acts of its program.
    """

    programs: tuple[Program, ...]
    gone: tuple[int, int] | None = None


ACTS = st.builds(
    Act,
    st.sampled_from([REDUCES, REDUCES, REDUCES, SHARES, GATHERS, EXCHANGES, SENDS, WAITS]),
    st.sampled_from([*OPS]),
    st.sampled_from(["float64", "float32", "int64"]),
    st.sampled_from([0, 1, 2, 4]),
    st.integers(0, SIZE - 1),
    st.sampled_from(["", "a", "b"]),
    st.booleans(),
)


@st.composite
def plays(draw: st.DrawFn) -> Play:
    common = draw(st.lists(ACTS, min_size=1, max_size=8))
    programs = []
    for _ in range(SIZE):
        own = []
        for act in common:
            other = draw(ACTS)
            one = draw(st.sampled_from(["op", "dtype", "rows", "root", "name", "is_beside"]))
            nearly = replace(act, **{one: getattr(other, one)})
            own.append(draw(st.sampled_from([act] * 8 + [nearly, other])))
        programs.append(tuple(own[: draw(st.sampled_from([len(own)] * 3 + [*range(len(own))]))]))
    gone = None
    if draw(st.sampled_from([False] * 3 + [True])):
        rank = draw(st.integers(0, SIZE - 1))
        gone = (rank, draw(st.integers(0, len(programs[rank]))))
    return Play(tuple(programs), gone)


def do(tensors: Any, act: Act, rank: int, place: int) -> Any:
    import torch

    from sparkdl.collectives.transport import Op, Reduction

    data, what = torch.from_numpy(act.given(rank, place)), act.name
    if act.kind == REDUCES:
        return tensors.all_reduce_(data, Reduction(Op(act.op)), what).tolist()
    if act.kind == SHARES:
        return tensors.reduce_scatter(data, Reduction(Op(act.op)), what).tolist()
    if act.kind == GATHERS:
        return tensors.all_gather(data, what)[0].tolist()
    if act.kind == EXCHANGES:
        return tensors.all_to_all(data, None, what)[0].tolist()
    if act.kind == SENDS:
        return tensors.broadcast_(data, act.root, what).tolist()
    return tensors.join() if act.kind == JOINS else tensors.barrier()


def perform(plays: list[Play], ctx: NodeContext) -> list[list[tuple[str, Any]]]:
    """Be a member of a group; return for each play what came of each of its acts.

    That is `done`, `refused` or `failed`, and what was returned or said.
    """
    from sparkdl.collectives.group import connect

    group: Any = connect(ctx.rank, SIZE, ctx.all_gather, ctx.member.host, _TIMEOUT_S)
    found = [act_out(group, play) for play in plays]
    if plays[-1].gone and plays[-1].gone[0] == ctx.rank:
        group.close()
    ctx.barrier()
    group.close()
    return found


def act_out(group: Any, play: Play) -> list[tuple[str, Any]]:
    """Be a member in one play, until it has joined or is gone."""
    from sparkdl.core.errors import CollectiveError, MismatchError

    def outcome(wait: Callable[[], Any]) -> tuple[str, Any]:
        try:
            return "done", wait()
        except MismatchError as error:
            return "refused", str(error)
        except CollectiveError as error:
            return "failed", str(error)

    acts, found = [*play.programs[group.rank], Act(JOINS)], list[Any]()
    if play.gone and play.gone[0] == group.rank:
        del acts[play.gone[1] :]
    for place, act in enumerate(acts):
        work = partial(do, group, act, group.rank, place)
        found.append(group.submit(work) if act.is_beside else outcome(partial(group.run, work)))
    return [outcome(one.result) if isinstance(one, Future) else one for one in found]


def expected(play: Play) -> Iterator[dict[int, tuple[str, Any]]]:
    """Yield what comes of each act in turn, by rank, until all have joined or one has gone.

    Those that have joined wait: nothing comes of it before the end.
    """
    programs = [[*program, Act(JOINS)] for program in play.programs]
    for place in range(max(map(len, programs))):
        if play.gone and play.gone[1] <= place:
            yield {rank: ("failed", "") for rank in range(SIZE) if rank != play.gone[0]}
            return
        acts = {r: program[min(place, len(program) - 1)] for r, program in enumerate(programs)}
        active = {rank: act for rank, act in acts.items() if act.kind != JOINS}
        if not active:
            last = [r for r, program in enumerate(programs) if len(program) == place + 1]
            yield dict.fromkeys(range(SIZE), ("joined", last))
            return
        first = next(iter(active.values()))
        fits = len({act.agreed for act in active.values()}) == 1 and (
            len(active) == SIZE or (first.kind == REDUCES and first.op != "max")
        )
        if fits:
            yield {rank: ("done", computed(active, rank, place)) for rank in active}
        else:
            said = [f"rank {rank}: {act.kind}" for rank, act in acts.items()]
            yield dict.fromkeys(active, ("refused", said))


def computed(active: dict[int, Act], rank: int, place: int) -> list[Any] | None:
    """Return what numpy makes of it, for one member."""
    act, arrays = active[rank], {r: one.given(r, place) for r, one in active.items()}
    if act.kind in (REDUCES, SHARES):
        zeros = [np.zeros_like(arrays[rank])] * (SIZE - len(active))
        whole = OPS[act.op](np.stack([*arrays.values(), *zeros]), axis=0)
        whole = np.trunc(whole) if act.dtype == "int64" else whole
        parts = np.array_split(whole, SIZE)
        return list((whole if act.kind == REDUCES else parts[rank]).tolist())
    if act.kind == GATHERS:
        return list(np.concatenate([*arrays.values()]).tolist())
    if act.kind == EXCHANGES:
        return list(np.concatenate([np.split(a, SIZE)[rank] for a in arrays.values()]).tolist())
    return list(arrays[act.root].tolist()) if act.kind == SENDS else None


three = lab_of("torch", SIZE, feeding=Feeding(fed=False))


@pytest.mark.smoke
@given(st.lists(plays(), min_size=1, max_size=6))
def test_members_agree_or_are_told_what_each_called(three: Lab, played: list[Play]) -> None:
    ends = [number for number, play in enumerate(played, 1) if play.gone]
    played = played[: min(ends, default=len(played))]
    by_rank = together(three, perform, played)
    for play, *results in zip(played, *by_rank, strict=True):
        check(play, results)


def check(play: Play, results: list[list[tuple[str, Any]]]) -> None:
    for place, wanted in enumerate(expected(play)):
        lasts = set()
        for rank, (kind, what) in wanted.items():
            found, told = results[rank][min(place, len(results[rank]) - 1)]  # or that of `join`
            assert found == kind.replace("joined", "done"), (place, rank, told)
            if kind == "refused":
                assert all(said in told for said in what), told
            elif kind == "failed":
                assert "by peer" in told, told
            elif kind == "joined":
                lasts.add(told)
                assert told in what
            elif what is None:
                assert told is None
            else:
                np.testing.assert_allclose(told, what, rtol=1e-6)
        assert len(lasts) <= 1, "all agree on who was the last to join"
