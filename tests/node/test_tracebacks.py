"""A traceback that a user reads has the user's frames, and sparkdl's only where they are all."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import pytest

from sparkdl.core.errors import ConfigError
from sparkdl.core.options import Recovery
from sparkdl.node import child
from sparkdl.node.child import user_traceback

OURS = str(child.__file__).removesuffix("child.py") + "made_up.py"


def through_us(call: Callable[[], Any]) -> BaseException:
    """Return what `call` raises when a frame of sparkdl's has called it."""
    code = compile("def begin(call):\n    call()\n", OURS, "exec")
    names: dict[str, Any] = {}
    exec(code, names)
    try:
        names["begin"](call)
    except Exception as error:  # noqa: BLE001 (whatever it is)
        error.__traceback__ = error.__traceback__.tb_next  # type: ignore[union-attr]  # this one
        return error
    raise AssertionError("nothing was raised")


def divide() -> None:
    raise ZeroDivisionError("by zero")


def wrap() -> None:
    raise ValueError("because of that") from through_us(divide)


def names_of(text: str) -> list[str]:
    return [line.rpartition(" in ")[2] for line in text.splitlines() if line.startswith("  File")]


def test_frames_that_led_to_the_users_code_are_left_out() -> None:
    error = through_us(divide)
    assert names_of("".join(traceback.format_exception(error))) == ["begin", "divide"]
    assert names_of(user_traceback(error)) == ["divide"]
    assert user_traceback(error).endswith("ZeroDivisionError: by zero\n")


def test_frames_are_left_out_all_along_the_chain() -> None:
    text = user_traceback(through_us(wrap))
    assert names_of(text) == ["divide", "wrap"]
    assert "direct cause" in text


def test_call_that_sparkdl_refuses_is_shown_as_the_users_line() -> None:
    def ask() -> None:
        Recovery(wait_s=0)

    error = through_us(ask)
    assert isinstance(error, ConfigError)
    assert names_of(user_traceback(error)) == ["ask"]


def test_error_of_another_kind_within_sparkdl_keeps_its_frames() -> None:
    def call_wrongly() -> None:
        Recovery(wait_s="soon")  # type: ignore[arg-type]

    assert names_of(user_traceback(through_us(call_wrongly)))[:1] == ["call_wrongly"]
    assert len(names_of(user_traceback(through_us(call_wrongly)))) > 1


def test_frames_of_sparkdl_alone_are_all_there() -> None:
    with pytest.raises(TypeError) as caught:
        Recovery(wait_s="soon")  # type: ignore[arg-type]
    error = caught.value
    error.__traceback__ = error.__traceback__.tb_next  # type: ignore[union-attr]
    assert len(names_of(user_traceback(error))) == len(traceback.extract_tb(error.__traceback__))
