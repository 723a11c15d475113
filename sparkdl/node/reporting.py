"""What user code tells of its training: the message for the agent.

Runs in: child
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

from sparkdl.control.channel import Reported
from sparkdl.core.errors import ConfigError


def reported(step: Any, metrics: Mapping[str, Any]) -> Reported:
    """Return the message for `NodeContext.report`.

    Args:
        step: a whole number; arrays and tensors of one such number are taken as well.
        metrics: likewise, of any number.

    Raises:
        ConfigError: if one of them is something else.
    """
    try:
        number = operator.index(step.item() if hasattr(step, "item") else step)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"report(step={step!r}): a whole number is needed ({error})") from None
    if number < 0:
        raise ConfigError(f"report(step={number}): steps are 0 or more")
    values = {}
    for name, value in metrics.items():
        try:
            values[name] = float(value)
        except (TypeError, ValueError) as error:
            text = f"report({name}={value!r}): a number is needed ({error})"
            raise ConfigError(text) from None
    return Reported(number, values)
