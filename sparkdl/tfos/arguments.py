"""What sparkdl reads from the arguments that a program gives to its own function.

Runs in: driver, feeder
"""

from __future__ import annotations

from typing import Any


def num_gpus(args: Any) -> int | dict[str, int] | None:
    """Return `num_gpus` of a dict, an argparse namespace or another object; `None` without."""
    value = args.get("num_gpus") if isinstance(args, dict) else getattr(args, "num_gpus", None)
    if value is None or isinstance(value, dict):
        return value
    return int(value)
