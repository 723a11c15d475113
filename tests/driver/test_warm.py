"""For how long zygotes outlive a launch, by default and where it is asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from sparkdl.core.errors import ConfigError
from sparkdl.driver.warm import NOTEBOOK_S, TUNING_S, VARIABLE, chosen_keep_s, is_in_search


def within(module: str, function: Callable[[], Any]) -> Any:
    """Call `function` from a module of that name."""
    scope = {"__name__": module, "function": function}
    return eval("function()", scope)


@pytest.mark.parametrize(
    ("asked_s", "is_notebook", "environ", "expected_s"),
    [
        (None, False, {}, 0.0),
        (None, True, {}, NOTEBOOK_S),
        (None, True, {VARIABLE: ""}, NOTEBOOK_S),
        (None, True, {VARIABLE: "0"}, 0.0),
        (None, False, {VARIABLE: "7.5"}, 7.5),
        (0, True, {VARIABLE: "7.5"}, 0.0),
        (30, False, {}, 30.0),
    ],
)
def test_argument_goes_before_the_variable_and_that_before_the_default(
    asked_s: float | None, is_notebook: bool, environ: dict[str, str], expected_s: float
) -> None:
    assert chosen_keep_s(asked_s, lambda: is_notebook, environ) == expected_s


@pytest.mark.parametrize("module", ["pyspark.ml.tuning", "sparkdl.ml.tuning"])
def test_fit_within_a_search_keeps_zygotes_for_the_next_one(module: str) -> None:
    assert not is_in_search()
    assert within(module, lambda: chosen_keep_s(None, lambda: False, {})) == TUNING_S
    assert within(module, lambda: chosen_keep_s(None, lambda: False, {VARIABLE: "0"})) == 0.0


@pytest.mark.parametrize("text", ["soon", "1 s", "-1", "inf", "nan"])
def test_variable_that_is_no_number_is_named(text: str) -> None:
    with pytest.raises(ConfigError, match=f"{VARIABLE}={text!r} must be a number"):
        chosen_keep_s(None, lambda: False, {VARIABLE: text})
