"""What members announce: what goes on after a `join`, and who joined last."""

from __future__ import annotations

import pytest

from sparkdl.collectives.agreement import Call, Kind, digest, last_to_join, objection

MAX = Call(Kind.ALL_REDUCE, digest("max of [3]"), numel=3, is_sum=False)
GATHER = Call(Kind.ALL_GATHER, digest("rows"), extra=1)


def joined(stood_in: int = 0, since_ns: int = 0) -> Call:
    return Call(Kind.JOIN, digest("join()"), extra=stood_in, since_ns=since_ns)


@pytest.mark.parametrize("call", [MAX, GATHER])
def test_only_sums_go_on_without_those_that_have_joined(call: Call) -> None:
    assert "only sums and averages" in str(objection([call, joined()]))


@pytest.mark.parametrize(
    ("calls", "last"),
    [
        ((joined(0), joined(1)), 0),
        ((joined(1), joined(0), joined(2)), 1),
        ((joined(0, since_ns=5), joined(0, since_ns=4), joined(1, since_ns=9)), 0),
        ((joined(2), joined(2)), 1),
    ],
)
def test_last_to_join_has_stood_in_least_then_came_latest(
    calls: tuple[Call, ...], last: int
) -> None:
    assert last_to_join(calls) == last
