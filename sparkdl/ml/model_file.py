"""A model's file at the driver, and how it comes there from a node.

Runs in: driver
"""

from __future__ import annotations

import atexit
import gc
import hashlib
import os
import tempfile
import threading
import weakref
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.flight as flight

from sparkdl.core.deadline import Deadline
from sparkdl.core.errors import ResultError
from sparkdl.core.jobs import context_of
from sparkdl.core.texts import docs_page
from sparkdl.feed.transfer.files import FilePiece, SentFile, digest_of
from sparkdl.feed.transfer.messages import BROKEN, FeedSpec, flight_reason
from sparkdl.ml.scoring.source import SPARK_FILE, Format, ModelSource

_PAUSE_S = 0.5
_PLAN_NBYTES = 64 << 20
"""Above this a model is no part of a plan: Spark Connect ends at messages of 128 MB."""
_MAX_RELEASED = 100
_sending = threading.Lock()
_served: list[tuple[ModelFile, Any]] = []
"""Files that Spark gives to executors, each with a weak reference to a plan's function in the JVM;
None where there is no reference, and the file stays until the program ends."""
_released: list[str] = []
"""Names of files that no plan needs any more: the next model's tasks delete them at executors."""


class ModelFile:
    """A model's file of this process, which deletes it once nothing refers to this object.

    Args:
        write: writes the model to a path.
        digest: of the file's content, if it is known: SHA-256.
    """

    def __init__(self, kind: Format, write: Callable[[Path], Any], digest: str = "") -> None:
        # Keras takes a file for its own by this ending.
        descriptor, name = tempfile.mkstemp(f".{kind}", "sparkdl-")
        os.close(descriptor)
        self.path, self.kind = Path(name), kind
        self._sent: set[str] = set()
        self._copies: list[Path] = []
        weakref.finalize(self, _delete, self.path, os.getpid(), self._copies)
        write(self.path)
        self._digest = digest
        self.nbytes = self.path.stat().st_size

    @classmethod
    def of(cls, content: bytes, kind: Format) -> ModelFile:
        return cls(kind, lambda path: path.write_bytes(content))

    @classmethod
    def moved(cls, path: Any, kind: Format) -> ModelFile:
        """Return the model of a file, whose place it leaves."""
        return cls(kind, partial(os.replace, path))

    @cached_property
    def digest(self) -> str:
        """Of the content: a large one is read for it, when somebody asks."""
        return self._digest or digest_of(self.path)

    def __reduce__(self) -> Any:
        return ModelFile.of, (self.path.read_bytes(), self.kind)

    def __fspath__(self) -> str:
        return str(self.path)

    @property
    def source(self) -> ModelSource:
        """The model for this process; others cannot read it."""
        return ModelSource(str(self.path), self.kind, self.digest)

    @property
    def whole(self) -> ModelSource:
        """The model with its content."""
        return replace(self.source, path="", content=self.path.read_bytes())

    def source_for_tasks(self, spark: Any) -> ModelSource:
        """Return the model for tasks and nodes: within their plan, or as a file of the application.

        Spark copies such a file to each executor, once.
        """
        if self.nbytes <= _PLAN_NBYTES:
            return self.whole
        context = context_of(spark)
        owner = spark.session_id if context is None else context.applicationId
        with _sending:  # fits in several threads may begin with one model
            if owner not in self._sent:
                if context is None:
                    spark.addArtifacts(str(self.path), file=True)
                else:
                    from pyspark import SparkFiles  # which a client of Spark Connect has not

                    _release(context)
                    context.addFile(str(self.path))
                    self._copies.append(Path(SparkFiles.get(self.path.name)))
                    atexit.register(_delete, self.path, os.getpid(), [])
                self._sent.add(owner)
        released = tuple(_released[-_MAX_RELEASED:])
        return replace(self.source, path=SPARK_FILE + self.path.name, released=released)

    def keep_for(self, udf: Any, spark: Any) -> None:
        """Keep a file that was sent for as long as a plan of Spark has this function."""
        if not self._copies:
            return
        with _sending:
            try:
                function = udf._unwrapped._judf.func()
                plan = context_of(spark)._jvm.java.lang.ref.WeakReference(function)
            except AttributeError:  # another Spark
                plan = None
            _served.append((self, plan))


def _release(context: Any) -> None:
    """Forget the files whose plans neither this program nor Spark knows any more."""
    if _served:
        gc.collect()  # Py4J's objects are cycles
        context._jvm.System.gc()
        _served[:] = [each for each in _served if _is_known(each[1])]


def _is_known(plan: Any) -> bool:
    try:
        return plan is None or plan.get() is not None
    except Exception:  # noqa: BLE001 (Py4J's, which a client of Spark Connect has not)
        return False  # the JVM has ended, and its plans with it


def _delete(path: Path, pid: int, copies: list[Path]) -> None:
    """Delete a file; if Spark has copied it, leave an empty one: new executors ask for it."""
    if os.getpid() != pid:  # a fork has the object, too
        return
    with suppress(OSError):
        path.unlink()
        for copy in copies and (path, *copies):
            copy.unlink(missing_ok=True)
            copy.touch()
        if copies:
            _released.append(path.name)


def fetch_file(
    spec: FeedSpec, uri: str, sent: SentFile, target: Path, patience_s: float = 60.0
) -> None:
    """Write a file of a node's agent to `target`, over as many connections as it takes.

    Raises:
        ResultError: if no piece comes for `patience_s`, or the bytes are not those of the node.
    """
    client, done, digest = None, 0, hashlib.sha256()
    deadline = Deadline.after(patience_s)
    with target.open("wb") as out, ExitStack() as connection:
        while done < sent.nbytes:
            ticket = flight.Ticket(msgspec.json.encode(FilePiece(sent.name, done)))
            try:
                client = client or connection.enter_context(spec.connect(uri))
                reader = client.do_get(ticket, spec.options(deadline.remaining_s))
                data = memoryview(reader.read_chunk().data.column(0)[0].as_buffer())
            except (*BROKEN, pa.ArrowException) as error:
                if deadline.has_passed or not isinstance(error, BROKEN):
                    raise _failed(sent, done, uri, flight_reason(error)) from None
                connection.close()
                client = None
                threading.Event().wait(_PAUSE_S)
                continue
            if not data:
                raise _failed(sent, done, uri, "the file ends there")
            out.write(data)
            digest.update(data)
            done += len(data)
            deadline = Deadline.after(patience_s)
    if done != sent.nbytes or digest.hexdigest() != sent.sha256:
        raise _failed(sent, done, uri, "its checksum is not that of the node's file")


def _failed(sent: SentFile, done: int, uri: str, reason: str) -> ResultError:
    return ResultError(
        f"{sent.name} did not reach the driver: {done} of {sent.nbytes} bytes came from {uri}: "
        f"{reason}. The driver must reach the agents' ports ({docs_page('security', 'ports')}). Or "
        "set model_dir to a folder that nodes and driver share"
    )
