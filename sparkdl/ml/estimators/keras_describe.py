"""What a Keras model takes, asked of a process of its own: TensorFlow takes the driver's GPUs.

Runs in: driver
"""

from __future__ import annotations

import logging
import pickle
import subprocess
import sys
from functools import lru_cache
from typing import Any

import cloudpickle
import msgspec

from sparkdl.core.errors import ConfigError
from sparkdl.ml.estimators.describe import run_beside
from sparkdl.ml.estimators.keras_model import Made, compiled, costs_nothing, inputs_of
from sparkdl.ml.estimators.source import Tensor

_log = logging.getLogger(__name__)
_DEADLINE_S = 120.0


class Answer(msgspec.Struct, frozen=True):
    """What a model takes, or why it cannot be trained, or not be made here."""

    inputs: tuple[Tensor, ...] | None = None
    refused: str = ""
    failed: str = ""


def described(
    made: Made, optimizer: Any, loss: Any, metrics: Any, is_made_here: bool
) -> tuple[Tensor, ...] | None:
    """Return the model's inputs; None if it cannot be made here, so that only nodes can tell.

    It is made in this process if that takes no more than memory, see `costs_nothing`.

    Args:
        is_made_here: it is to be made in this process anyway.

    Raises:
        ConfigError: if the model cannot be trained, see `compiled`.
    """
    if is_made_here or costs_nothing(made):
        answer = _answer(made, optimizer, loss, metrics)
    else:
        try:
            answer = ask_beside(cloudpickle.dumps((made, optimizer, loss, metrics)))
        except (pickle.PicklingError, TypeError) as error:
            raise ConfigError(f"what makes the model cannot be pickled: {error}") from error
    if answer.refused:
        raise ConfigError(answer.refused)
    if answer.failed:
        _log.warning(
            "The model cannot be made on the driver, so the nodes will tell: %s", answer.failed
        )
    return answer.inputs


@lru_cache(maxsize=8)
def ask_beside(asked: bytes) -> Answer:
    """Have a process of its own make the pickled model; without GPUs."""
    try:
        done = run_beside(__name__, asked, _DEADLINE_S)
    except subprocess.TimeoutExpired:
        return Answer(failed=f"not within {_DEADLINE_S:g} s")
    if done.returncode:
        return Answer(failed=f"exit code {done.returncode}")
    return msgspec.json.decode(done.stdout.rpartition(b"\n")[2], type=Answer)


def _answer(*asked: Any) -> Answer:
    try:
        return Answer(inputs_of(compiled(*asked)))
    except ConfigError as error:
        return Answer(refused=str(error))
    except Exception as error:  # noqa: BLE001 (whatever the user's function raises)
        return Answer(failed=f"{type(error).__name__}: {error}")


def main() -> int:
    """Read what makes a model from the standard input, make it, and write what it takes."""
    answer = _answer(*cloudpickle.loads(sys.stdin.buffer.read()))
    sys.stdout.write(f"\n{msgspec.json.encode(answer).decode()}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
