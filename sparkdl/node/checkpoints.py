"""A node's side of checkpoints: what `ctx.checkpoint` and `ctx.last_checkpoint` do.

All nodes that train write their files, and report the rows their state was trained on. Once the
driver has all reports, the first node completes the checkpoint, and reports this to the driver.
From then on a restart resumes from it.

`ctx.checkpoint` does this in the thread of the training, `ctx.checkpoint_async` in another one.
That thread agrees with the other nodes through the driver as well: collectives of the framework
would mix with those of the training. At most one checkpoint of a node is in flight.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import msgspec

from sparkdl.control.channel import CheckpointBegun, Checkpointed
from sparkdl.control.messages import CheckpointDone
from sparkdl.control.rows import EpochRows
from sparkdl.core.deadline import Deadline
from sparkdl.core.errors import CheckpointError, ConfigError, SparkdlError
from sparkdl.core.spec import ClusterSpec
from sparkdl.core.world import CheckpointRef, Member, Resume, World
from sparkdl.node.checkpoint_store import (
    CheckpointName,
    CheckpointStore,
    Manifest,
    late_text,
    open_store,
)
from sparkdl.node.link import AgentLink

_log = logging.getLogger(__name__)
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)
_MAX_PROBLEM_CHARS = 1000
_SAVERS = ("AsyncCheckpointExecutor", "async_save")
"""Begin the names of the threads in which PyTorch's `async_save` and Orbax write."""
_SAVER_END_S = 1.0
"""A saver's thread ends a moment after the result of its save is known."""


class PendingCheckpoint:
    """A checkpoint that `ctx.checkpoint_async` has begun.

    Attributes:
        folder: for the files, as of `ctx.checkpoint`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._waits: list[Callable[[], object]] = []
        self._is_open = True

    def until(self, written: Any) -> None:
        """Complete the checkpoint only when these files are written; call it inside the block.

        Args:
            written: a future, what `torch.distributed.checkpoint.async_save` or Orbax returns, or
                Orbax's `AsyncCheckpointer`; or a function without arguments that writes the files,
                or waits until they are written. It runs in a thread of sparkdl's after the block,
                while the training continues.

        Raises:
            ConfigError: if `written` is neither, or the block has ended.
        """
        written = getattr(written, "upload_completion", written)
        finish = getattr(written, "result", getattr(written, "wait_until_finished", written))
        if not callable(finish):
            raise ConfigError(
                f"until({written!r}): must be a future or a function without arguments that waits "
                "until the files are written"
            )
        if not self._is_open:
            raise ConfigError(
                "until() after the block of ctx.checkpoint_async: call it inside, because the "
                "checkpoint may be complete by now"
            )
        self._waits.append(finish)

    def close(self) -> None:
        self._is_open = False


class LastCheckpoint(os.PathLike[str]):
    """A checkpoint to resume from.

    Attributes:
        step: the number that it was made with.
        url: of its folder.
    """

    def __init__(self, ref: CheckpointRef, scratch: Path | None = None) -> None:
        self.step = ref.step
        self.url = ref.url
        self._scratch = scratch

    def __repr__(self) -> str:
        return f"LastCheckpoint(step={self.step}, url={self.url!r})"

    def __fspath__(self) -> str:
        return str(self.folder)

    __str__ = __fspath__

    @cached_property
    def folder(self) -> Path:
        """The local folder with its files; from HDFS or an object store they come here once.

        Raises:
            CheckpointError: if it cannot be read, or files of it are missing.
        """
        parent, _, name = self.url.rpartition("/")
        store = open_store(parent, self._scratch)
        try:
            folder = store.fetch(name)
        except OSError as error:
            raise CheckpointError(f"{self.url} cannot be read: {error}") from error
        if not folder.is_dir():
            raise CheckpointError(
                f"{self.url} is not on this node; put checkpoint_dir on storage that all nodes "
                "share"
            )
        store.manifest(name)
        return folder

    def covered(self, feed: str) -> EpochRows:
        """Return the rows it covers of a feed read by nodes themselves, by epoch.

        Raises:
            CheckpointError: if it cannot be read.
        """
        parent, _, name = self.url.rpartition("/")
        feeds = open_store(parent, self._scratch).manifest(name).feeds
        return feeds[feed].rows.get(0, {}) if feed in feeds else {}


class Checkpoints:
    """This node's part in the checkpoints of its world; see docs/recovery.md."""

    def __init__(
        self,
        world: World,
        member: Member,
        spec: ClusterSpec,
        link: AgentLink,
        resume: Resume,
        scratch: Path | None,
    ) -> None:
        self._spec = spec
        self._generation = world.generation
        self._member = member
        self._node = member.node.name
        self._leads = member.rank == 0
        self._link = link
        self._resumed = resume.checkpoint
        self._scratch = scratch
        self._last_step: int | None = None
        self._is_open = False
        self._made: tuple[CheckpointName, Manifest | None] | None = None
        """The last checkpoint of this world; with its manifest on the node that completed it."""
        self._in_flight: tuple[int, Future[None]] | None = None

    @cached_property
    def last(self) -> LastCheckpoint | None:
        return None if self._resumed is None else LastCheckpoint(self._resumed, self._scratch)

    def covered(self, feed: str) -> EpochRows:
        """Return the rows of a feed of the nodes' own that the last checkpoint covers, by epoch."""
        return {} if self.last is None else self.last.covered(feed)

    @contextmanager
    def write(self, step: int, batches: int | Mapping[str, int] | None) -> Iterator[Path]:
        with self._begin(step, batches) as (name, pending):
            yield pending.folder
        self._finish(name, pending.folder, ())

    @contextmanager
    def write_async(
        self, step: int, batches: int | Mapping[str, int] | None
    ) -> Iterator[PendingCheckpoint]:
        with self._begin(step, batches) as (name, pending):
            yield pending
        with self._reported(name, pending.folder):
            finish = partial(self._finish, name, pending.folder, pending._waits)
            self._in_flight = step, _in_thread(finish)

    @contextmanager
    def _begin(
        self, step: int, batches: int | Mapping[str, int] | None
    ) -> Iterator[tuple[CheckpointName, PendingCheckpoint]]:
        """Open the folder, for a block of user code that writes into it."""
        store = self._store
        self._check(step)
        # Taken before the block, in which user code may read on.
        used = CheckpointBegun(*self._link.feeds.positions(batches))
        name = CheckpointName(step, self._spec.cluster_id, self._generation)
        if self._leads and self._last_step is None:
            # Leftovers of failed checkpoints only take space: they must not fail this one.
            with suppress(OSError):
                store.sweep_unfinished(name)
        self._last_step, self._is_open = step, True
        try:
            with self._reported(name, None):
                self.await_in_flight()
                if late := self._late():
                    raise CheckpointError(late)
                self._link.send(used)
                with self._named_errors(name):
                    folder = store.open(name)
            pending, others = PendingCheckpoint(folder), _savers()
            with self._reported(name, folder):
                try:
                    with self._named_errors(name, is_users=True):
                        yield name, pending
                finally:
                    pending.close()
                if not pending._waits:
                    _refuse(_savers() - others, step)
        finally:
            self._is_open = False

    def _finish(
        self, name: CheckpointName, folder: Path, waits: Iterable[Callable[[], object]]
    ) -> None:
        """Wait for the files, and report this node's part; on the first node complete the whole."""
        with self._reported(name, folder):
            with self._named_errors(name, is_users=True):
                for finish in waits:
                    finish()
            with self._named_errors(name):
                self._store.finish(name, folder, self._node)
        self._link.send(Checkpointed(name.step))
        self._made = (name, None)
        if self._leads:
            self._made = (name, self._complete(name))

    @contextmanager
    def _reported(self, name: CheckpointName, folder: Path | None) -> Iterator[None]:
        """Report an error inside, and delete this node's files."""
        try:
            yield
        except BaseException as error:
            # Report every end, sys.exit too: otherwise the first node waits for its timeout.
            problem = f"{type(error).__name__}: {error}"[:_MAX_PROBLEM_CHARS]
            # On a shared disk the folder belongs to all nodes, so only the first one deletes it.
            self._store.give_up(name, folder, for_all=self._leads)
            self._link.send(Checkpointed(name.step, problem))
            raise

    def await_in_flight(self) -> None:
        """Wait for the checkpoint in flight, and raise its error."""
        if self._in_flight is None:
            return
        step, written = self._in_flight
        timeout_s = self._spec.settings.feeding.timeout_s
        if not wait((written,), timeout_s).done:
            raise CheckpointError(
                f"the checkpoint of step {step} is still being written after {timeout_s:g} s; make "
                "checkpoints less often, or raise Feeding(timeout_s=…), the limit for this wait"
            )
        self._in_flight = None
        try:
            written.result()
        except SparkdlError:
            raise
        except BaseException as error:
            raise CheckpointError(
                f"there is no checkpoint of step {step}: its files could not be written: "
                f"{type(error).__name__}: {error}"
            ) from error

    def end(self) -> None:
        """Wait for the checkpoint in flight; log an error if the last one was written to since.

        Raises:
            CheckpointError: if the one in flight fails.
        """
        self.await_in_flight()
        if late := self._late():
            _log.error("%s", late)

    def _late(self) -> str:
        """Return what is wrong with the last checkpoint, which counts no more then; or nothing."""
        if self._made is None:
            return ""
        (name, manifest), store = self._made, self._store
        try:
            late = store.late(name, manifest)
            if not late:
                return ""
            self._made = None
            store.revoke(name)
        except OSError as error:  # the next checkpoint finds out whether the storage works
            _log.debug("%s cannot be compared with its manifest: %s", name, error)
            return ""
        return late_text(store.url_of(name), late)

    @cached_property
    def _store(self) -> CheckpointStore:
        url = self._spec.checkpoint_dir
        if url is None:
            raise ConfigError(
                "ctx.checkpoint needs a place: launch the cluster with checkpoint_dir=..., a path "
                "or URL that all nodes reach"
            )
        if not self._member.role.is_trainer or self._member.role.is_server:
            raise ConfigError(
                f"{self._node} does not train: call ctx.checkpoint on chief and workers"
            )
        return open_store(url, self._scratch)

    def _check(self, step: int) -> None:
        if type(step) is not int or step < 0:
            raise ConfigError(f"step={step!r} must be a whole number, 0 or more")
        if self._is_open:
            raise ConfigError(
                f"ctx.checkpoint({step}) inside ctx.checkpoint({self._last_step}): leave one first"
            )
        if self._last_step is not None and step <= self._last_step:
            raise ConfigError(
                f"ctx.checkpoint({step}) after ctx.checkpoint({self._last_step}): steps must grow"
            )
        if self._resumed is not None and step < self._resumed.step:
            raise ConfigError(
                f"ctx.checkpoint({step}), but the feeds continue at step {self._resumed.step}: "
                "load ctx.last_checkpoint and count on from its step. To start over, choose "
                "another checkpoint_dir"
            )

    def _complete(self, name: CheckpointName) -> Manifest:
        """Wait for the other nodes' parts, and make one checkpoint of them; return its manifest."""
        try:
            manifest = self._await_parts(name.step)
            with self._named_errors(name):
                complete = self._store.commit(name, manifest)
        except BaseException:
            self._store.give_up(name, None, for_all=True)
            raise
        self._link.send(CheckpointDone(self._generation, name.step, self._store.url_of(name)))
        try:
            # The new checkpoint has been reported: an error with the old ones must not fail it.
            keep = self._spec.settings.recovery.keep_checkpoints
            self._store.sweep(name, keep, self._resumed.name if self._resumed else "")
        except OSError as error:
            _log.warning(
                "Old checkpoints could not be deleted: %s. Delete them by hand, or let nodes "
                "delete in checkpoint_dir",
                error,
            )
        return complete

    def _await_parts(self, step: int) -> Manifest:
        timeout_s = self._spec.settings.feeding.timeout_s
        deadline = Deadline.after(timeout_s)
        missing: tuple[str, ...] = ()
        while (reply := self._link.wait_commit(step, deadline)) is not None:
            if reply.problem:
                raise CheckpointError(f"there is no checkpoint of step {step}: {reply.problem}")
            if reply.manifest:
                return msgspec.json.decode(reply.manifest, type=Manifest)
            # The driver reports each time which nodes are missing; the error has the last one.
            missing = reply.missing
        who = ", ".join(missing) or "the driver"
        raise CheckpointError(
            f"there is no checkpoint of step {step}: within {timeout_s:g} s nothing came from "
            f"{who}. Call ctx.checkpoint on all nodes that train, with the same steps; "
            "Feeding(timeout_s=…) is how long the first node waits"
        )

    @contextmanager
    def _named_errors(self, name: CheckpointName, is_users: bool = False) -> Iterator[None]:
        """Name the failed checkpoint in a disk's errors, and say that the others are intact.

        Args:
            is_users: the code is the user's, whose other errors are not ours.
        """
        try:
            yield
        except OSError as error:
            is_ours = str(name) in str(error.filename or "") or error.errno in _DISK_ERRORS
            if is_users and not is_ours:
                raise
            raise CheckpointError(
                f"the checkpoint of step {name.step} could not be written to "
                f"{self._spec.checkpoint_dir}: {error}. Those before it are as they were; make "
                "room, or choose another checkpoint_dir"
            ) from error


def _in_thread(work: Callable[[], None]) -> Future[None]:
    done = Future[None]()

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 (the training's thread raises it)
            done.set_exception(error)
        else:
            done.set_result(None)

    # A daemon: a node that fails ends without this write.
    threading.Thread(target=run, name="sparkdl-checkpoint", daemon=True).start()
    return done


def _savers() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith(_SAVERS)}


def _refuse(savers: set[threading.Thread], step: int) -> None:
    """Raise if one of these threads still writes."""
    for saver in savers:
        saver.join(_SAVER_END_S)
        if saver.is_alive():
            raise CheckpointError(
                f"there is no checkpoint of step {step}: an asynchronous save has not finished at "
                "the end of the block. Wait for it inside, with future.result() or "
                "wait_until_finished(); or use ctx.checkpoint_async, and pass the future to until()"
            )
