"""A traceback that a user reads has the user's frames, and sparkdl's only where they are all."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

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


def names_of(text: str) -> list[str]:
    return [line.rpartition(" in ")[2] for line in text.splitlines() if line.startswith("  File")]


def test_frames_that_led_to_the_users_code_are_left_out() -> None:
    error = through_us(divide)
    assert names_of("".join(traceback.format_exception(error))) == ["begin", "divide"]
    assert names_of(user_traceback(error)) == ["divide"]
    assert user_traceback(error).endswith("ZeroDivisionError: by zero\n")
