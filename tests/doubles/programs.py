"""Programs that tests run to their end."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path


def output_of(
    *command: str | Path,
    timeout_s: float = 60.0,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    with_stderr: bool = False,
) -> str:
    """Run a program, which must succeed; return what it printed.

    Args:
        env: variables beside those of this process.
        with_stderr: returns stderr as well, line by line as it came.
    """
    done = subprocess.run(
        command,
        cwd=cwd,
        env=os.environ | (env or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if with_stderr else subprocess.PIPE,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-8000:]}{(done.stderr or '')[-4000:]}"
    return done.stdout
