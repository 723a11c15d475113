"""A code and its values are read again out of any text that is written around them."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sparkdl.core.codes import Code

texts = st.text()


@given(st.sampled_from(Code), st.lists(texts, max_size=3), texts, texts)
@example(Code.RAISED, ["ConfigError", 'ends with "]'], "", '"]')
@example(Code.RAISED, ["ConfigError", "C:\\"], "", "")
@example(Code.RAISED, ["ConfigError", '\\"] \\\\'], "", "")
@example(Code.RAISED, ["ConfigError", "lines\nand\ttabs \u2028"], "", "")
def test_a_code_is_found_again_in_any_text_around_it(
    code: Code, values: list[str], before: str, after: str
) -> None:
    text = f"{before}\n{code.mark(*values)}\n{after}"
    assert code.values_in(text) == tuple(values)
    assert [each for each in Code if each.is_in(RuntimeError(text))] == [code]


@given(st.sampled_from(Code), texts)
def test_a_text_without_a_code_has_none(code: Code, text: str) -> None:
    assert not code.is_in(text)


@pytest.mark.parametrize("text", ['[SPARKDL-RAISED "a"', '[SPARKDL-RAISED "a]', "SPARKDL-RAISED"])
def test_half_a_code_is_none(text: str) -> None:
    assert not Code.RAISED.is_in(text)


def test_a_code_is_a_word_in_brackets() -> None:
    assert f"{Code.FEED_LOST} worker:0" == "[SPARKDL-FEED-LOST] worker:0"
