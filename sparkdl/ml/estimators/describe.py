"""Inspect a model's inputs and outputs in a separate process, so that the driver stays light.

Runs in: driver

TensorFlow costs seconds, memory and the memory of a GPU, which a node on this machine may need. No
process is started if the driver has imported the framework already.
"""

from __future__ import annotations

import logging
import os
import pickle
import subprocess
import sys
from functools import lru_cache
from typing import Any

import cloudpickle

from sparkdl.core.errors import ConfigError, FrameworkMissingError, SparkdlError, in_words
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
_DEADLINE_S = 600.0
KerasAnswer = tuple[Signature | None, int]
"""A Keras model's inputs and outputs, None if only the nodes can make it; its weights' bytes."""


def signature_of(source: ModelSource) -> Signature:
    """Return what a saved model takes and gives; asked once for each content of local files.

    Raises:
        ConfigError: if the model cannot be loaded.
        FrameworkMissingError: if TensorFlow is not installed for the driver.
    """
    # A URL has no fingerprint, so its model may change unnoticed.
    return _known(source) if source.fingerprint else _ask(source)


def _ask(source: ModelSource) -> Signature:
    name = "torch" if source.format in TORCH else "tensorflow"
    try:
        if name in sys.modules:
            return load(source).signature
        found: Signature = _apart(cloudpickle.dumps((_signature, source)))
        return found
    except (ConfigError, FrameworkMissingError):
        raise
    except ImportError as error:
        raise FrameworkMissingError(
            f"{name} cannot be imported by the driver, which asks it for the model's outputs: "
            f"{error}. Install it: pip install {name}"
            + (" (or tensorflow-cpu)" if name == "tensorflow" else "")
        ) from error
    except Exception as error:
        raise ConfigError(
            f"the model {source.path} cannot be loaded: {in_words(error)}. Give one that the "
            f"{name} of this machine loads"
        ) from error


_known = lru_cache(maxsize=8)(_ask)


def _signature(source: ModelSource) -> Signature:
    return load(source).signature


def keras_answer(recipe: Recipe, is_made_here: bool) -> KerasAnswer:
    """Return what a Keras model takes and gives.

    It is made in this process if that takes no more than memory, see `costs_nothing`.

    Args:
        is_made_here: it is to be made in this process anyway.

    Raises:
        ConfigError: if the model cannot be trained, see `Recipe.model` and `checked_file`.
    """
    try:
        if is_made_here or costs_nothing(recipe.made):
            return tried(recipe)
        found: KerasAnswer = _known_apart(_pickled(recipe))
        return found
    except ConfigError:
        raise
    except Exception as error:  # noqa: BLE001 (whatever the user's function raises)
        _log.warning(
            "The model cannot be made on the driver, so its inputs and outputs are checked on "
            "the nodes only: %s",
            in_words(error),
        )
        return None, 0


def tried(recipe: Recipe) -> KerasAnswer:
    """Make a Keras model, and return what it takes and gives."""
    model = recipe.model()
    # A model that was given as an object was tried when it was given.
    if not isinstance(recipe.made, bytes):
        checked_file(model, recipe.objects)
    outputs = outputs_of(model) if model.outputs else ()
    return Signature(inputs_of(model), outputs), weights_nbytes(model)


def _pickled(recipe: Recipe) -> bytes:
    try:
        return bytes(cloudpickle.dumps((tried, recipe)))
    except (pickle.PicklingError, TypeError) as error:
        raise ConfigError(
            f"what makes the model cannot be pickled: {error}. Make locks, files and connections "
            "inside the function"
        ) from error


def _apart(asked: bytes) -> Any:
    """Call a function with its argument, pickled, in a process that sees no GPU.

    Raises:
        SparkdlError, ImportError: what the function raises; its other errors as a SparkdlError.
    """
    # Without GPUs: TensorFlow would take their memory from a node on this machine.
    own = {"PYTHONPATH": python_path(), "CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "3"}
    try:
        done = subprocess.run(
            [sys.executable, "-m", __name__],
            input=asked,
            capture_output=True,
            env=os.environ | own,
            timeout=_DEADLINE_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise SparkdlError(f"not within {_DEADLINE_S:g} s; is its storage slow?") from None
    if done.returncode:
        # The last line of Python's traceback has the error; the rest is about this process.
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        raise SparkdlError(lines[-1] if lines else f"exit code {done.returncode}")
    found = cloudpickle.loads(done.stdout)
    if isinstance(found, Exception):
        raise found
    return found


_known_apart = lru_cache(maxsize=8)(_apart)


def main() -> None:
    """Answer the request on standard input."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever the model prints is no part of the answer
    with quick_imports():
        try:
            call, given = cloudpickle.load(sys.stdin.buffer)
            found = call(given)
        except (SparkdlError, ImportError) as error:
            found = error
        except Exception as error:  # noqa: BLE001 (the driver may lack its class)
            found = SparkdlError(in_words(error))
    with out:
        cloudpickle.dump(found, out)


if __name__ == "__main__":
    main()
