"""What a saved model takes and gives: asked of a process of its own, so the driver stays light.

Runs in: driver

TensorFlow costs seconds, memory and the memory of a GPU. A driver that has imported it already is
asked itself.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from functools import lru_cache

import msgspec

from sparkdl.core.errors import ConfigError, FrameworkMissingError
from sparkdl.ml.estimators.source import ModelSource, Signature
from sparkdl.ml.scoring.predict import load

_DEADLINE_S = 600.0
_MISSING = 3
_REFUSED = 4


def signature_of(source: ModelSource) -> Signature:
    """Return what a model takes and gives; asked once for each content of local files.

    Raises:
        ConfigError: if the model cannot be loaded.
        FrameworkMissingError: if TensorFlow is not installed for the driver.
    """
    return _known(source) if source.fingerprint else _ask(source)


@lru_cache(maxsize=64)
def _known(source: ModelSource) -> Signature:
    return _ask(source)


def _ask(source: ModelSource) -> Signature:
    if "tensorflow" not in sys.modules:
        return _ask_process(source)
    try:
        return load(source).signature
    except ConfigError:
        raise
    except Exception as error:
        raise _unloadable(source, str(error)) from error


def _unloadable(source: ModelSource, reason: str) -> ConfigError:
    return ConfigError(f"the model {source.path} cannot be loaded: {reason}")


def run_beside(module: str, given: bytes, timeout_s: float) -> subprocess.CompletedProcess[bytes]:
    """Run a module as a process that reads `given` and sees no GPU.

    Raises:
        TimeoutExpired: of `subprocess`.
    """
    return subprocess.run(
        [sys.executable, "-m", module],
        input=given,
        capture_output=True,
        env=os.environ
        | {
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "CUDA_VISIBLE_DEVICES": "",
            "TF_CPP_MIN_LOG_LEVEL": "3",
        },
        timeout=timeout_s,
        check=False,
    )


def _ask_process(source: ModelSource) -> Signature:
    given = msgspec.json.encode(replace(source, content=None))
    try:
        done = run_beside(__name__, given, _DEADLINE_S)
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"the model {source.path} was not loaded within {_DEADLINE_S:g} s; is its storage slow?"
        ) from None
    told = done.stdout.decode(errors="replace").strip()
    if done.returncode == _MISSING:
        raise FrameworkMissingError(
            f"TensorFlow cannot be imported by the driver, which asks it for the model's outputs: "
            f"{told}. Install it: pip install tensorflow (or tensorflow-cpu)"
        )
    if done.returncode == _REFUSED:
        raise ConfigError(told)
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        raise _unloadable(source, lines[-1] if lines else f"exit code {done.returncode}")
    return msgspec.json.decode(told.splitlines()[-1], type=Signature)


def main() -> int:
    """Read a source from the standard input, load it, and write its signature."""
    source = msgspec.json.decode(sys.stdin.buffer.read(), type=ModelSource)
    try:
        answer = msgspec.json.encode(load(source).signature).decode()
        code = 0
    except ImportError as error:
        answer, code = str(error), _MISSING
    except ConfigError as error:
        answer, code = str(error), _REFUSED
    sys.stdout.write(f"{answer}\n")
    return code


if __name__ == "__main__":
    raise SystemExit(main())
