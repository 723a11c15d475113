"""Tracebacks as the user wants to read them: without sparkdl's frames around the user's own.

Runs in: anywhere
"""

from __future__ import annotations

import os
import traceback
from pathlib import Path

from sparkdl.core.errors import SparkdlError

_OWN = (f"{Path(__file__).parent.parent}{os.sep}", "<frozen runpy>")
"""Files of frames between a node's start and the user's code."""


def user_traceback(error: BaseException) -> str:
    """Return the traceback of what user code raised.

    Of each exception in the chain the frames that led from sparkdl to the user's code are left out;
    of an error that sparkdl raises on purpose, those behind the user's call as well. Where there
    are no other frames than sparkdl's, all are there.
    """
    told = traceback.TracebackException.from_exception(error)
    _shorten(told, issubclass(type(error), SparkdlError), set())
    return "".join(told.format())


def _shorten(told: traceback.TracebackException, is_ours: bool, seen: set[int]) -> None:
    if id(told) in seen:
        return
    seen.add(id(told))
    own = [frame.filename.startswith(_OWN) for frame in told.stack]
    if not all(own):
        ends = [len(own)]
        if is_ours:  # what dataclasses generate is in no file
            files = [frame.filename for frame in told.stack]
            ends += [i + 1 for i, file in enumerate(files) if not own[i] and file != "<string>"]
        told.stack[:] = told.stack[own.index(False) : ends[-1]]
    for other in (told.__cause__, told.__context__, *(getattr(told, "exceptions", None) or ())):
        if other is not None:
            _shorten(other, False, seen)
