"""Inspect a model's inputs and outputs in a separate process, so that the driver stays light.

Runs in: driver

TensorFlow costs seconds, memory and the memory of a GPU, which a node on this machine may need. No
process is started if the driver has imported the framework already.
"""

from __future__ import annotations

import os
import subprocess
import sys
from functools import lru_cache
from typing import Any

import cloudpickle

from sparkdl.core.errors import ConfigError, FrameworkMissingError, SparkdlError, in_words
from sparkdl.core.files import python_path
from sparkdl.core.imports import quick_imports
from sparkdl.ml.scoring.loaded import load
from sparkdl.ml.scoring.source import ModelSource, Signature

_DEADLINE_S = 600.0


def signature_of(source: ModelSource) -> Signature:
    """Return what a saved model takes and gives; asked once for each content of local files."""
    # A URL has no fingerprint, so its model may change unnoticed.
    return _known(source) if source.fingerprint else _ask(source)


def _ask(source: ModelSource) -> Signature:
    try:
        if "tensorflow" in sys.modules:
            return load(source).signature
        return _apart(source)
    except (ConfigError, FrameworkMissingError):
        raise
    except ImportError as error:
        raise FrameworkMissingError(
            "the driver needs tensorflow to find the model's outputs, and cannot import it: "
            f"{error}. Install it: pip install tensorflow (or tensorflow-cpu)"
        ) from error
    except Exception as error:
        raise ConfigError(
            f"the model {source.path} cannot be loaded: {in_words(error)}. Give one that the "
            "tensorflow of this machine loads"
        ) from error


_known = lru_cache(maxsize=8)(_ask)


def _apart(source: ModelSource) -> Signature:
    # Without GPUs: TensorFlow would take their memory from a node on this machine.
    own = {"PYTHONPATH": python_path(), "CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "3"}
    try:
        done = subprocess.run(
            [sys.executable, "-m", __name__],
            input=cloudpickle.dumps(source),
            capture_output=True,
            env=os.environ | own,
            timeout=_DEADLINE_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise SparkdlError(f"no answer within {_DEADLINE_S:g} s; its storage may be slow") from None
    if done.returncode:
        # The last line of Python's traceback has the error; the rest is about this process.
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        raise SparkdlError(lines[-1] if lines else f"exit code {done.returncode}")
    found: Signature | Exception = cloudpickle.loads(done.stdout)
    if isinstance(found, Exception):
        raise found
    return found


def main() -> None:
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever the model prints is no part of the answer
    with quick_imports():
        try:
            found: Any = load(cloudpickle.load(sys.stdin.buffer)).signature
        except (SparkdlError, ImportError) as error:
            found = error
        except Exception as error:  # noqa: BLE001 (the driver may lack its class)
            found = SparkdlError(in_words(error))
    with out:
        cloudpickle.dump(found, out)


if __name__ == "__main__":
    main()
