"""For how long zygotes outlive a launch, and the key by which the next one finds them.

Runs in: driver
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache

from sparkdl.control.auth import new_token
from sparkdl.core.errors import ConfigError

VARIABLE = "SPARKDL_KEEP_WARM_S"
NOTEBOOK_S = 120.0
"""A person thinks between two cells."""
TUNING_S = 60.0
"""A search evaluates models between two fits."""
_TUNERS = ("pyspark.ml.tuning", "sparkdl.ml.tuning")


@cache
def warm_key() -> str:
    """Return the secret key by which agents of this driver find their zygotes."""
    return new_token()


def chosen_keep_s(
    asked_s: float | None, is_in_notebook: Callable[[], bool], environ: Mapping[str, str]
) -> float:
    """Return for how long zygotes outlive a launch, in seconds.

    Raises:
        ConfigError: if the environment variable is no such number.
    """
    if asked_s is not None:
        return float(asked_s)
    if text := environ.get(VARIABLE):
        with suppress(ValueError):
            if 0 <= (seconds := float(text)) < math.inf:
                return seconds
        raise ConfigError(f"{VARIABLE}={text!r} must be a number of seconds, 0 or more, and finite")
    if is_in_search():
        return TUNING_S
    return NOTEBOOK_S if is_in_notebook() else 0.0


def is_in_search() -> bool:
    """Whether a search of Spark ML's, or of sparkdl's, has called this: it will call again."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__") in _TUNERS:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
