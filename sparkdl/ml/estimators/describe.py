"""What a model takes and gives: asked of a process of its own, so the driver stays light.

Runs in: driver

TensorFlow costs seconds, memory and the memory of a GPU. A driver that has imported it already is
asked itself, and most files of models say it.
"""

from __future__ import annotations

import logging
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

import cloudpickle
import msgspec

from sparkdl.core.errors import ConfigError, FrameworkMissingError
from sparkdl.core.imports import quick_imports
from sparkdl.core.paths import python_path
from sparkdl.ml.estimators.keras_model import Made, compiled, costs_nothing, inputs_of
from sparkdl.ml.estimators.source import TORCH, ModelSource, Signature, Tensor
from sparkdl.ml.scoring.held import load
from sparkdl.ml.scoring.keras_file import signature_in_keras_file
from sparkdl.ml.scoring.saved_model import signature_in_file

_log = logging.getLogger(__name__)
_SAVED_DEADLINE_S = 600.0
_KERAS_DEADLINE_S = 120.0
_IN_FILES: Mapping[str, Callable[[ModelSource], Signature | None]] = {
    "saved_model": signature_in_file,
    "keras": signature_in_keras_file,
    "weights": signature_in_keras_file,
}
_MISSING = 3
_REFUSED = 4


def signature_of(source: ModelSource) -> Signature:
    """Return what a saved model takes and gives; asked once for each content of local files.

    Raises:
        ConfigError: if the model cannot be loaded.
        FrameworkMissingError: if TensorFlow is not installed for the driver.
    """
    return _known(source) if source.fingerprint else _ask(source)


def _ask(source: ModelSource) -> Signature:
    in_file = _IN_FILES.get(source.format)
    if in_file is not None and (found := in_file(source)) is not None:
        return found
    if _framework(source) not in sys.modules:
        return _ask_process(source)
    try:
        return load(source).signature
    except ConfigError:
        raise
    except Exception as error:
        raise _unloadable(source, str(error)) from error


_known = lru_cache(maxsize=64)(_ask)


def _framework(source: ModelSource) -> str:
    return "torch" if source.format in TORCH else "tensorflow"


def _unloadable(source: ModelSource, reason: str) -> ConfigError:
    return ConfigError(f"the model {source.path} cannot be loaded: {reason}")


def _ask_process(source: ModelSource) -> Signature:
    given = msgspec.json.encode(replace(source, content=None))
    try:
        done = _run_process("saved", given, _SAVED_DEADLINE_S)
    except subprocess.TimeoutExpired:
        limit = f"{_SAVED_DEADLINE_S:g} s"
        raise ConfigError(
            f"the model {source.path} was not loaded within {limit}; is its storage slow?"
        ) from None
    answer = done.stdout.decode(errors="replace").strip()
    if done.returncode == _MISSING:
        name = _framework(source)
        raise FrameworkMissingError(
            f"{name} cannot be imported by the driver, which asks it for the model's outputs: "
            f"{answer}. Install it: pip install {name}"
            + (" (or tensorflow-cpu)" if name == "tensorflow" else "")
        )
    if done.returncode == _REFUSED:
        raise ConfigError(answer)
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        raise _unloadable(source, lines[-1] if lines else f"exit code {done.returncode}")
    return msgspec.json.decode(answer.splitlines()[-1], type=Signature)


class KerasAnswer(msgspec.Struct, frozen=True):
    """What a model takes, or why it cannot be trained (`refused`), or not be made here."""

    inputs: tuple[Tensor, ...] | None = None
    refused: str = ""
    failed: str = ""


def keras_inputs(
    made: Made, optimizer: Any, loss: Any, metrics: Any, is_made_here: bool
) -> tuple[Tensor, ...] | None:
    """Return a Keras model's inputs; None if only the nodes can make it.

    It is made in this process if that takes no more than memory, see `costs_nothing`.

    Args:
        is_made_here: it is to be made in this process anyway.

    Raises:
        ConfigError: if the model cannot be trained, see `compiled`.
    """
    if is_made_here or costs_nothing(made):
        answer = _keras_answer(made, optimizer, loss, metrics)
    else:
        try:
            answer = ask_keras_process(cloudpickle.dumps((made, optimizer, loss, metrics)))
        except (pickle.PicklingError, TypeError) as error:
            raise ConfigError(f"what makes the model cannot be pickled: {error}") from error
    if answer.refused:
        raise ConfigError(answer.refused)
    if answer.failed:
        _log.warning("The model cannot be made on the driver, only on the nodes: %s", answer.failed)
    return answer.inputs


@lru_cache(maxsize=8)
def ask_keras_process(asked: bytes) -> KerasAnswer:
    """Have a process of its own make the pickled model; without GPUs."""
    try:
        done = _run_process("keras", asked, _KERAS_DEADLINE_S)
    except subprocess.TimeoutExpired:
        return KerasAnswer(failed=f"not within {_KERAS_DEADLINE_S:g} s")
    if done.returncode:
        return KerasAnswer(failed=f"exit code {done.returncode}")
    return msgspec.json.decode(done.stdout.rpartition(b"\n")[2], type=KerasAnswer)


def _keras_answer(*asked: Any) -> KerasAnswer:
    try:
        return KerasAnswer(inputs_of(compiled(*asked)))
    except ConfigError as error:
        return KerasAnswer(refused=str(error))
    except Exception as error:  # noqa: BLE001 (whatever the user's function raises)
        return KerasAnswer(failed=f"{type(error).__name__}: {error}")


def _run_process(kind: str, given: bytes, timeout_s: float) -> subprocess.CompletedProcess[bytes]:
    """Run this module as a process that reads `given` and sees no GPU."""
    return subprocess.run(
        [sys.executable, "-m", __name__, kind],
        input=given,
        capture_output=True,
        env=os.environ
        | {
            "PYTHONPATH": python_path(),
            "CUDA_VISIBLE_DEVICES": "",
            "TF_CPP_MIN_LOG_LEVEL": "3",
        },
        timeout=timeout_s,
        check=False,
    )


def main(kind: str) -> int:
    """Answer what is asked on the standard input: of a saved model, or of a pickled Keras one."""
    given = sys.stdin.buffer.read()
    if kind == "keras":
        with quick_imports():
            found = _keras_answer(*cloudpickle.loads(given))
        answer, code = msgspec.json.encode(found).decode(), 0
    else:
        try:
            source = msgspec.json.decode(given, type=ModelSource)
            with quick_imports():
                signature = load(source).signature
            answer, code = msgspec.json.encode(signature).decode(), 0
        except ImportError as error:
            answer, code = str(error), _MISSING
        except ConfigError as error:
            answer, code = str(error), _REFUSED
    sys.stdout.write(f"\n{answer}")  # in a line of its own, whatever was printed before
    return code


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
