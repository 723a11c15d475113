"""Covering arrays: few cases in which each pair of values of two options comes up. Pure, greedy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, combinations, product
from random import Random

Case = dict[str, int]
"""The place of each option's value among its values."""
Place = tuple[str, int]


def pairs_in(case: Case) -> set[tuple[Place, Place]]:
    return set(combinations(sorted(case.items()), 2))


def cover(
    sizes: Mapping[str, int],
    is_allowed: Callable[[Case], bool],
    beginnings: Sequence[Case] = (),
    random: Random | None = None,
) -> list[Case]:
    """Return cases that have all pairs that may come together.

    Args:
        sizes: how many values each option has; those that rules are about first, to be quick.
        is_allowed: whether the options that are chosen so far may come together.
        beginnings: cases begin with one of these, in turn, where a missing pair goes with one.
        random: gives other arrays; without it each call gives the same.
    """
    places = {option: [(option, n) for n in range(size)] for option, size in sizes.items()}
    every = (product(places[a], places[b]) for a, b in combinations(sorted(sizes), 2))
    missing = {pair for pairs in every for pair in pairs if is_allowed(dict(pair))}
    found: list[Case] = []

    def next_from(start: Case) -> Case | None:
        wanted = Counter(chain.from_iterable(missing))
        pairs = sorted(missing)
        if random is not None:
            random.shuffle(pairs)
        begun = ({**start, **dict(pair)} for pair in pairs)
        may = (case for case in begun if start.items() <= case.items() and is_allowed(case))
        filled = (_filled(case, places, is_allowed, missing, wanted) for case in may)
        return next(filter(None, filled), None)

    for starts in (beginnings, ({},)):
        before = -1
        while before < len(found):
            before = len(found)
            for case in filter(None, map(next_from, starts)):
                found.append(case)
                missing -= pairs_in(case)
    return found


def _filled(
    case: Case,
    places: Mapping[str, Sequence[Place]],
    is_allowed: Callable[[Case], bool],
    missing: set[tuple[Place, Place]],
    wanted: Mapping[Place, int],
) -> Case | None:
    """Return the case with the best value of each further option; `None` if one has none."""
    for option in (name for name in places if name not in case):
        may = [each for each in places[option] if is_allowed({**case, option: each[1]})]

        def gain(place: Place, case: Case = case) -> tuple[int, int]:
            pairs = ((min(place, each), max(place, each)) for each in case.items())
            return sum(pair in missing for pair in pairs), wanted[place]

        if not may:
            return None
        case = {**case, option: max(may, key=gain)[1]}
    return case
