"""Lists in messages are short, however many nodes there are."""

from __future__ import annotations

from sparkdl.core.listing import listed


def test_a_few_are_all_listed_and_of_many_the_first_and_a_count() -> None:
    assert listed([]) == ""
    assert listed([str(n) for n in range(10)]) == "0, 1, 2, 3, 4, 5, 6, 7, 8, 9"
    assert listed([f"worker:{n}" for n in range(1000)], "; ") == (
        "worker:0; worker:1; worker:2; worker:3; worker:4 and 995 more"
    )
