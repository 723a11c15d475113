"""A Python program in several processes of this machine, as `horovodrun` starts it.

Runs in: driver, child
"""

from __future__ import annotations

import logging
import os
import runpy
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparkdl.core.errors import ConfigError
from sparkdl.horovod.runner import run

_log = logging.getLogger(__name__)
_SHAPE = "write `python train.py …`, `python -m package.train …` or `train.py …`"


@dataclass(frozen=True)
class Command:
    """A program and its arguments. Called in each process, it runs as `__main__`.

    Attributes:
        target: path of a script, or name of a module.
        arguments: of its command line.
    """

    target: str
    arguments: tuple[str, ...]
    is_module: bool = False

    @classmethod
    def parse(cls, words: Sequence[str]) -> Command:
        """Read a command line.

        Raises:
            ConfigError: if it does not start a Python program, or one that is not there.
        """
        rest = list(words)
        is_started = bool(rest) and _is_python(rest[0])
        if is_started:
            _check_interpreter(rest.pop(0))
            if rest[:1] == ["-u"]:  # lines come as they are printed anyway
                rest.pop(0)
            if rest[:1] == ["-m"] and len(rest) > 1:
                return cls(rest[1], tuple(rest[2:]), is_module=True)
        if not rest or rest[0].startswith("-") or not (is_started or rest[0].endswith(".py")):
            raise ConfigError(f"{' '.join(words)!r} does not start a Python program: {_SHAPE}")
        if not Path(rest[0]).is_file():
            raise ConfigError(f"there is no file {rest[0]} in {Path.cwd()}")
        return cls(rest[0], tuple(rest[1:]))

    def __call__(self) -> None:
        """Run it here."""
        sys.argv = [self.target, *self.arguments]
        found_in = os.getcwd() if self.is_module else str(Path(self.target).absolute().parent)
        sys.path.insert(0, found_in)
        try:
            if self.is_module:
                runpy.run_module(self.target, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(self.target, run_name="__main__")
        except SystemExit as stop:
            if stop.code not in (None, 0):
                raise


def run_command(words: Sequence[str], num_proc: int, **options: Any) -> None:
    """Run a command line in `num_proc` processes, whose lines are printed.

    Args:
        options: of `horovod.run`.

    Raises:
        ConfigError: if it cannot work.
        NodeFailedError: if a process failed.
    """
    run(Command.parse(words), num_proc=num_proc, **options)


def _is_python(word: str) -> bool:
    return Path(word).name.rstrip("0123456789.") == "python"


def _check_interpreter(word: str) -> None:
    named = shutil.which(word)
    if named is None or Path(named).absolute().parent != Path(sys.executable).absolute().parent:
        _log.warning("%s: the processes run under %s", word, sys.executable)
