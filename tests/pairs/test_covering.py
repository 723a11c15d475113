"""A covering array has each pair that rules allow, and the tables know each option there is."""

from __future__ import annotations

from itertools import product
from random import Random
from typing import Any

from hypothesis import given, strategies as st

from tests.pairs.covering import Case, cover, pairs_in
from tests.pairs.options import unknown_options

NAMES = st.sampled_from("abcde")
PAIR = st.dictionaries(NAMES, st.integers(0, 2), min_size=2, max_size=2)
# An option of three values has one left, whatever two forbidden pairs take.
SIZES: st.SearchStrategy[Any] = st.one_of(
    st.tuples(st.dictionaries(NAMES, st.integers(1, 3), min_size=2), st.just([])),
    st.tuples(st.just(dict.fromkeys("abcde", 3)), st.lists(PAIR, max_size=2)),
)


@given(SIZES, st.randoms(use_true_random=False))
def test_each_pair_that_may_come_together_comes_up(sized: Any, random: Random) -> None:
    sizes, forbidden = sized

    def is_allowed(case: Case) -> bool:
        return not any(each.items() <= case.items() for each in forbidden)

    found = cover(sizes, is_allowed, random=random)
    assert all(case.keys() == sizes.keys() and is_allowed(case) for case in found)
    every = product(*(range(size) for size in sizes.values()))
    cases = (dict(zip(sizes, each, strict=True)) for each in every)
    wanted = {pair for case in cases if is_allowed(case) for pair in pairs_in(case)}
    assert {pair for case in found for pair in pairs_in(case)} == wanted
    assert cover(sizes, is_allowed) == cover(sizes, is_allowed)


def test_cases_begin_as_told_where_that_brings_new_pairs() -> None:
    starts = [{"a": 0, "b": 0}, {"a": 1, "b": 1}]
    found = cover({"a": 2, "b": 2, "c": 3, "d": 3}, lambda case: True, starts)
    begun = [{"a": case["a"], "b": case["b"]} in starts for case in found]
    assert begun == sorted(begun, reverse=True)
    assert begun.count(False) == 2  # the other two pairs of `a` and `b`


def test_tables_know_each_option_of_the_signatures() -> None:
    new = ", ".join(unknown_options())
    assert not new, (
        f"{new}: give a new option values in a table of tests/pairs/options.py, so that it comes "
        "up beside each other one, or name it in EXCLUDED with the reason"
    )
