"""Noise in what a node prints: TensorFlow's lines of every start, and progress bars.

Runs in: agent

They stay in the node's log. The driver does not show them unless the nodes' environment asks for
them, by `TF_CPP_MIN_LOG_LEVEL=0` or a level of `VLOG`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence

from sparkdl.control.messages import LogLines
from sparkdl.node.error_lines import marked_in, unmarked

_NOISE = re.compile(
    "|".join(
        (
            # The libraries' C++ at INFO, by the form of its lines: before absl's logging is
            # initialized, which Python never does, they have no date; those of TensorFlow have one.
            r"^I0000 00:00:\d+\.\d+ +\d+ [\w.]+:\d+\] ",
            r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+: I (tensorflow|external)/\S+:\d+\] ",
            r"^WARNING: All log messages before absl::InitializeLog\(\) is called",
            r"^To enable the following instructions: .* rebuild TensorFlow",
            r"^/job:\w+/replica:\d+/task:\d+$",  # a further line of "Example stragglers:"
            # These are warnings and errors by their letter alone: two libraries that TensorFlow
            # consists of register the same, https://github.com/tensorflow/tensorflow/issues/62075
            r"\] Unable to register cu\w+ factory: Attempting to register factory for plugin",
            r"\] computation placer already registered",
            r"\] TF-TRT Warning: Could not find TensorRT",
            # At each pass over `ctx.dataset`, whose rows come from Python: there is nothing to do.
            r"\] Input of GeneratorDatasetOp::Dataset will not be optimized",
            # Keras 3.15 at each `fit` of a dataset: it takes its own default for the caller's wish.
            r"UserWarning: `shuffle=True` was passed, but will be ignored since the data `x`",
            r"^  self\.data_adapter = data_adapters\.get_data_adapter\($",
            # A bar of tqdm, as Hugging Face's: a line each time that it moves.
            r"^([^|]{0,80}: )? *\d{1,3}%\|[^|]*\| \S+/\S+ \[.*\]$",
        )
    )
)
_ASKS = ("TF_CPP_MAX_VLOG_LEVEL", "TF_CPP_VMODULE")


def noise_in(lines: Sequence[str], environment: Mapping[str, str] = os.environ) -> tuple[int, ...]:
    """Return the indices of the noise among the lines.

    Args:
        environment: of the node.
    """
    if environment.get("TF_CPP_MIN_LOG_LEVEL") == "0" or any(it in environment for it in _ASKS):
        return ()
    return tuple(place for place, line in enumerate(lines) if _NOISE.search(line))


def printed(lines: Sequence[str], is_shown: bool) -> LogLines:
    """Return lines as the driver gets them.

    Args:
        lines: with the marks of error lines.
        is_shown: whether the driver prints the lines of this node; otherwise all are marked as
            noise.
    """
    plain = tuple(map(unmarked, lines))
    noise = noise_in(plain) if is_shown else tuple(range(len(plain)))
    return LogLines(plain, noise, marked_in(lines))


def without_noise(lines: Sequence[str], last: int) -> tuple[str, ...]:
    """Return so many of the other lines, the last ones."""
    noise = {*noise_in(lines)}
    others = [line for place, line in enumerate(lines) if place not in noise]
    return tuple(others[max(0, len(others) - last) :])
