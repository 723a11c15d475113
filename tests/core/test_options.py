"""Options that cannot work are refused where they are made, by object, name and value."""

from __future__ import annotations

import math
from typing import Any

import pytest

from sparkdl.core.errors import ConfigError
from sparkdl.core.options import Feeding, Recovery, Roles, Startup
from sparkdl.driver.options import OBJECTS, Observe


def test_all_options_can_be_left_out_and_are_given_by_name() -> None:
    for kind in OBJECTS.values():
        assert kind() == kind()
        with pytest.raises(TypeError):
            kind(1)


@pytest.mark.parametrize(
    ("kind", "name"), [(Recovery, "wait_s"), (Feeding, "timeout_s"), (Startup, "timeout_s")]
)
@pytest.mark.parametrize("value", [0, -1, -0.001, math.inf, math.nan])
def test_times_that_never_or_always_pass_are_refused(kind: Any, name: str, value: float) -> None:
    with pytest.raises(
        ConfigError, match=rf"^{kind.__name__}\({name}={value}\) must be above zero"
    ):
        kind(**{name: value})


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        (Roles, {"ps": -1}, r"^Roles\(ps=-1\) must be 0 or more"),
        *(
            (Recovery, {"host_timeout_s": value}, rf"host_timeout_s={value}\) must be at least 4 s")
            for value in (0, 3.9, math.inf, math.nan)
        ),
        (Recovery, {"min_nodes": 0}, r"min_nodes=0\) must be 1 or more, or None"),
        (Recovery, {"keep_checkpoints": 0}, r"keep_checkpoints=0\) must be 1 or more"),
        (Recovery, {"hang_timeout_s": 0.0}, r"hang_timeout_s=0.0\) must be above zero"),
        (Recovery, {"hang_timeout_s": math.inf}, "or None"),
        (Recovery, {"on_hang": "wait"}, "choose report, fail"),
        (Feeding, {"memory_nbytes": 0}, r"memory_nbytes=0\) must be at least one byte"),
        (Feeding, {"disk_nbytes": -1}, r"disk_nbytes=-1\) must be zero bytes or more"),
        (Observe, {"log_to_driver": print}, "Give a function as on_log"),
        (Startup, {"placement": "here"}, "placement='here'\\): choose"),
        (Startup, {"preload": ["scipy.stats", "my-module"]}, "'my-module' is no name of a module"),
        (Startup, {"preload": [5]}, "5 is no name of a module"),
        *(
            (Startup, {"tls": value}, r"tls=.*\): give True or False")
            for value in ("yes", 1, ("cert", "key", "ca"), object())
        ),
        (Startup, {"preload": 5}, r"preload=5\): give names of modules"),
    ],
)
def test_values_that_cannot_work_are_refused(kind: Any, options: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        kind(**options)


def test_one_name_to_preload_is_a_module_and_not_letters() -> None:
    assert Startup(preload="scipy").preload == ("scipy",)
