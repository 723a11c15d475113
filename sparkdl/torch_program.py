"""The function or program that a distributor runs in each process.

Runs in: driver, child
"""

from __future__ import annotations

import linecache
import os
import runpy
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle

from sparkdl.core.errors import ConfigError
from sparkdl.core.files import scratch_folder
from sparkdl.frameworks.framework import imported

if TYPE_CHECKING:
    from sparkdl.node.context import NodeContext


@dataclass(frozen=True)
class Script:
    """A program on its way to the nodes.

    Attributes:
        path: where it is on the driver. Modules beside it are found where that folder exists.
        text: its bytes.
    """

    path: str
    text: bytes

    def run(self, arguments: tuple[str, ...]) -> None:
        path, argv, found_in = Path(self.path), list(sys.argv), list(sys.path)
        with scratch_folder() as folder:
            program = path
            if not path.is_file() or path.read_bytes() != self.text:
                # A copy, because the driver's folder need not exist here.
                program = folder / path.name
                program.write_bytes(self.text)
            sys.argv = [str(program), *arguments]
            sys.path[0:0] = [str(path.parent)] if path.parent.is_dir() else []
            # Tracebacks show its lines: without a time, this entry is kept when the file is gone.
            lines = self.text.decode(errors="replace").splitlines(keepends=True)
            linecache.cache[str(program)] = (len(self.text), None, lines, str(program))
            try:
                runpy.run_path(str(program), run_name="__main__")
            except SystemExit as stop:  # as programs end
                if stop.code not in (None, 0):
                    raise
            finally:
                sys.argv, sys.path[:] = argv, found_in


@dataclass(frozen=True)
class Program:
    """`map_fun` of the nodes.

    Attributes:
        what: to run.
        folder: on this machine, for values of any size; `None` where nodes are elsewhere.
        is_own_group: set the variables of pyspark's processes on executors: to torchrun, each is
            the only process of its host, even if several share one.
        deepspeed: DeepSpeed's configuration, JSON, for the command line; empty for its defaults,
            `None` for a program without DeepSpeed.
    """

    what: Callable[..., Any] | Script
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    folder: str | None = None
    is_own_group: bool = False
    deepspeed: str | None = None

    def __call__(self, args: None, ctx: NodeContext) -> Any:
        """Run it; return its result, packed for `value_of`."""
        if self.is_own_group:
            rank, size = os.environ["RANK"], os.environ["WORLD_SIZE"]
            own = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "NODE_RANK": rank}
            os.environ.update(own | {"GROUP_RANK": rank, "GROUP_WORLD_SIZE": size})
        with self._deepspeed_arguments() as arguments:
            if isinstance(self.what, Script):
                self.what.run((*map(str, self.args), *arguments))
                return None
            sys.argv[1:] = arguments or sys.argv[1:]
            value = self.what(*self.args, **self.kwargs)
        return packed(value, self.folder) if ctx.is_chief else None

    @contextmanager
    def _deepspeed_arguments(self) -> Iterator[tuple[str, ...]]:
        """Yield what DeepSpeed's programs find at the end of their command line."""
        if self.deepspeed is None:
            yield ()
            return
        imported("deepspeed", "DeepSpeed", "deepspeed")
        with scratch_folder() as folder:
            file = folder / "deepspeed.json"
            file.write_text(self.deepspeed)
            yield ("--deepspeed", *(("--deepspeed_config", str(file)) if self.deepspeed else ()))


def script_of(path: str) -> Script:
    try:
        return Script(str(Path(path).absolute()), Path(path).read_bytes())
    except OSError as error:
        raise ConfigError(
            f"the program {path} cannot be read: {error}. Give the path of a file on the driver"
        ) from error


def packed(value: Any, folder: str | None) -> Any:
    """Return `value` pickled, or the file with it where nodes and driver share a folder.

    A value that cannot be pickled is returned as it is: the check of results rejects it by name.
    """
    try:
        data = bytes(cloudpickle.dumps(value))
    except Exception:  # noqa: BLE001 (whatever pickle raises)
        return value
    if folder is None:
        return data
    file, name = tempfile.mkstemp(dir=folder)
    with open(file, "wb") as out:
        out.write(data)
    return name


def value_of(data: bytes | str | None) -> Any:
    """Return the value out of what came to the driver; `None` of who has ended by `sys.exit(0)`."""
    if data is None:
        return None
    return cloudpickle.loads(data if isinstance(data, bytes) else Path(data).read_bytes())
