"""Inspect a model's inputs and outputs in a separate process, so that the driver stays light.

Runs in: driver

TensorFlow costs seconds, memory and the memory of a GPU. No process is started if the driver has
imported it already.
"""

from __future__ import annotations

import logging
import os
import pickle
import subprocess
import sys
from dataclasses import replace
from functools import lru_cache

import cloudpickle
import msgspec

from sparkdl.core.errors import ConfigError, FrameworkMissingError
from sparkdl.core.imports import quick_imports
from sparkdl.core.paths import python_path
from sparkdl.ml.estimators.keras_model import (
    Recipe,
    costs_nothing,
    inputs_of,
    outputs_of,
    weights_nbytes,
)
from sparkdl.ml.estimators.keras_objects import checked_file
from sparkdl.ml.estimators.source import TORCH, ModelSource, Signature
from sparkdl.ml.scoring.held import load

_log = logging.getLogger(__name__)
_SAVED_DEADLINE_S = 600.0
_KERAS_DEADLINE_S = 120.0


class Answer(msgspec.Struct, frozen=True):
    """A model's inputs and outputs, or the reason why they are unknown here.

    Attributes:
        refused: why it cannot be used.
        missing: the module that cannot be imported here.
        failed: why it could not be made or loaded here.
        nbytes: the size of a Keras model's weights.
    """

    signature: Signature | None = None
    refused: str = ""
    missing: str = ""
    failed: str = ""
    nbytes: int = 0


def signature_of(source: ModelSource) -> Signature:
    """Return what a saved model takes and gives; asked once for each content of local files.

    Raises:
        ConfigError: if the model cannot be loaded.
        FrameworkMissingError: if TensorFlow is not installed for the driver.
    """
    # A URL has no fingerprint, so its model may change unnoticed.
    return _known(source) if source.fingerprint else _ask(source)


def _ask(source: ModelSource) -> Signature:
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
    return ConfigError(
        f"the model {source.path} cannot be loaded: {reason}. Give one that the "
        f"{_framework(source)} of this machine loads"
    )


def _ask_process(source: ModelSource) -> Signature:
    given = msgspec.json.encode(replace(source, content=None))
    answer = _run_process("saved", given, _SAVED_DEADLINE_S)
    if answer.missing:
        name = _framework(source)
        raise FrameworkMissingError(
            f"{name} cannot be imported by the driver, which asks it for the model's outputs: "
            f"{answer.missing}. Install it: pip install {name}"
            + (" (or tensorflow-cpu)" if name == "tensorflow" else "")
        )
    if answer.refused:
        raise ConfigError(answer.refused)
    if answer.signature is None:
        raise _unloadable(source, answer.failed)
    return answer.signature


def keras_answer(recipe: Recipe, is_made_here: bool) -> Answer:
    """Return what a Keras model takes and gives; no signature if only the nodes can make it.

    It is made in this process if that takes no more than memory, see `costs_nothing`.

    Args:
        is_made_here: it is to be made in this process anyway.

    Raises:
        ConfigError: if the model cannot be trained, see `Recipe.model` and `checked_file`.
    """
    if is_made_here or costs_nothing(recipe.made):
        answer = _keras_answer(recipe)
    else:
        try:
            answer = ask_keras_process(cloudpickle.dumps(recipe))
        except (pickle.PicklingError, TypeError) as error:
            raise ConfigError(
                f"what makes the model cannot be pickled: {error}. Make locks, files and "
                "connections inside the function"
            ) from error
    if answer.refused:
        raise ConfigError(answer.refused)
    if answer.failed:
        _log.warning(
            "The model cannot be made on the driver, so its inputs and outputs are checked on "
            "the nodes only: %s",
            answer.failed,
        )
    return answer


@lru_cache(maxsize=8)
def ask_keras_process(asked: bytes) -> Answer:
    """Make the pickled model in a separate process, without GPUs."""
    return _run_process("keras", asked, _KERAS_DEADLINE_S)


def _keras_answer(recipe: Recipe) -> Answer:
    try:
        model = recipe.model()
        # A model that was given as an object was tried when it was given.
        if not isinstance(recipe.made, bytes):
            checked_file(model, recipe.objects)
        outputs = outputs_of(model) if model.outputs else ()
        return Answer(Signature(inputs_of(model), outputs), nbytes=weights_nbytes(model))
    except ConfigError as error:
        return Answer(refused=str(error))
    except Exception as error:  # noqa: BLE001 (whatever the user's function raises)
        return Answer(failed=f"{type(error).__name__}: {error}")


def _saved_answer(source: ModelSource) -> Answer:
    try:
        return Answer(load(source).signature)
    except ImportError as error:
        return Answer(missing=str(error))
    except ConfigError as error:
        return Answer(refused=str(error))


def _run_process(kind: str, given: bytes, timeout_s: float) -> Answer:
    """Run this module as a process that reads `given` and sees no GPU; return its answer."""
    # Without GPUs: TensorFlow would take their memory from a node on this machine.
    own = {"PYTHONPATH": python_path(), "CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "3"}
    try:
        done = subprocess.run(
            [sys.executable, "-m", __name__, kind],
            input=given,
            capture_output=True,
            env=os.environ | own,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Answer(failed=f"not within {timeout_s:g} s; is its storage slow?")
    if done.returncode:
        # The last line of Python's traceback has the error; the rest is about this process.
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        return Answer(failed=lines[-1] if lines else f"exit code {done.returncode}")
    return msgspec.json.decode(done.stdout.rpartition(b"\n")[2], type=Answer)


def main(kind: str) -> None:
    """Answer the request on standard input: about a saved model, or a pickled Keras model."""
    given = sys.stdin.buffer.read()
    with quick_imports():
        if kind == "keras":
            found = _keras_answer(cloudpickle.loads(given))
        else:
            found = _saved_answer(msgspec.json.decode(given, type=ModelSource))
    answer = msgspec.json.encode(found).decode()
    sys.stdout.write(f"\n{answer}")  # in a line of its own, whatever was printed before


if __name__ == "__main__":
    main(*sys.argv[1:])
