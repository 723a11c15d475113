"""Marks of error lines: each line has one, however its text is cut into writes."""

from __future__ import annotations

from hypothesis import given, strategies as st

from sparkdl.node.error_lines import MARK, Marker, marked_in, unmarked


@given(st.lists(st.text("ab\r\n")))
def test_each_line_has_one_mark_however_it_is_written(parts: list[str]) -> None:
    marker = Marker()
    text = "".join(marker(part) for part in parts)
    assert unmarked(text) == "".join(parts)
    lines = [line for line in text.replace("\r", "\n").split("\n") if line]
    assert marked_in(lines) == tuple(range(len(lines)))
    assert text.count(MARK) == len(lines)


def test_marks_do_not_reach_the_driver() -> None:
    lines = ("plain", f"{MARK}error", f"rest of a line {MARK}and an error")
    wanted = ("plain", "error", "rest of a line and an error")
    assert (tuple(map(unmarked, lines)), marked_in(lines)) == (wanted, (1,))
