"""Only the header with the very token opens the door."""

from __future__ import annotations

import pytest

from sparkdl.control.auth import is_authorized, new_token


def test_tokens_are_long_differ_and_fit_into_a_header() -> None:
    tokens = {new_token() for _ in range(50)}
    assert len(tokens) == 50
    for token in tokens:
        assert len(token) >= 43  # 256 bits in base64
        assert token.isascii()
        assert token.replace("-", "").replace("_", "").isalnum()


@pytest.mark.parametrize(
    "header",
    [None, "", "Bearer", "Bearer ", "secret", "bearer secret", "Bearer secret ", "Basic secret",
     "Bearer SECRET", "Bearer secre", "Bearer secrets", "Bearer secr\u00e9t", "Bearer \udcff"],
)  # fmt: skip
def test_any_other_header_is_not(header: str | None) -> None:
    assert not is_authorized(header, "secret")
