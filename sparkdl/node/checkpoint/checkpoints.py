"""`ctx.checkpoint` and `ctx.last_checkpoint`: the nodes' side of a checkpoint.

Runs in: child

All nodes that train write their files, and say which rows have made their state. Once the driver
has heard it from all, the first node makes the checkpoint complete, and the driver is told: from
then on it is the one that a restart goes on at.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path

import msgspec

from sparkdl.control.channel import Checkpointed, Committed
from sparkdl.control.rows import EpochRows
from sparkdl.core.checkpoint import CheckpointRef, Resume
from sparkdl.core.deadline import Deadline
from sparkdl.core.errors import CheckpointError, ConfigError
from sparkdl.core.spec import ClusterSpec
from sparkdl.core.world import Member, World
from sparkdl.node.checkpoint.manifest import CheckpointName, Manifest
from sparkdl.node.checkpoint.places import open_store
from sparkdl.node.checkpoint.store import CheckpointStore
from sparkdl.node.link import AgentLink

_log = logging.getLogger(__name__)
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)
_MAX_PROBLEM_CHARS = 1000


class LastCheckpoint(os.PathLike[str]):
    """A checkpoint to go on from.

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
            CheckpointError: if it cannot be read.
        """
        parent, _, name = self.url.rpartition("/")
        try:
            folder = open_store(parent, self._scratch).fetch(name)
        except OSError as error:
            raise CheckpointError(f"{self.url} cannot be read: {error}") from error
        if not folder.is_dir():
            raise CheckpointError(
                f"{self.url} is not on this node; put checkpoint_dir on storage that all nodes "
                "share"
            )
        return folder

    def covered(self, feed: str) -> EpochRows:
        """Return which rows it covers of a feed that the nodes read themselves, by epoch.

        Raises:
            CheckpointError: if it cannot be read.
        """
        parent, _, name = self.url.rpartition("/")
        feeds = open_store(parent, self._scratch).manifest(name).feeds
        return feeds[feed].rows.get(0, {}) if feed in feeds else {}


class Checkpointing:
    """What `ctx` offers to save a training, and to go on with one; see docs/checkpoints.md."""

    world: World
    member: Member
    _spec: ClusterSpec
    _link: AgentLink
    _resume: Resume
    _scratch: Path | None

    @property
    def checkpoint_dir(self) -> str | None:
        """The path or URL of the folder of the checkpoints; `None` if the launch named none."""
        return self._spec.checkpoint_dir

    @cached_property
    def last_checkpoint(self) -> LastCheckpoint | None:
        """The checkpoint that this world goes on from: its `step`, `folder` and `url`.

        `None` if it begins at the beginning. Does not change while `map_fun` runs.
        """
        ref = self._resume.checkpoint
        return None if ref is None else LastCheckpoint(ref, self._scratch)

    @contextmanager
    def checkpoint(
        self, step: int, batches: int | Mapping[str, int] | None = None
    ) -> Iterator[Path]:
        """Make a checkpoint of what is written into the folder that is yielded.

        Call it on all nodes that train, with the same steps. It is complete, or not there at all;
        the first node waits for the others, up to `feed_timeout`. An exception inside leaves no
        checkpoint, and those before untouched. On a local or mounted `checkpoint_dir` all nodes
        write into one and the same folder: nodes that write different things need different names.

        Args:
            step: how far the training is, by your own count; larger each time.
            batches: how many batches of the feed the saved state has used since `map_fun` began,
                by feed if there are several. By default all that were handed out, which is exact
                unless something reads ahead.

        Raises:
            ConfigError: without `checkpoint_dir`, on a node that does not train, inside another
                checkpoint, for a step that is not larger; or if `batches` must be given.
            CheckpointError: if it could not be written, or a node has not called this in time.
        """
        with self._writer.write(step, batches) as folder:
            yield folder

    def batches_given(self) -> dict[str, int]:
        """Return how many batches of each feed were handed out since `map_fun` began.

        What is read ahead of the training counts. At the end of an epoch it is what was used.
        """
        return self._link.batches_given()

    def _covered(self, feed: str) -> EpochRows:
        """Return the rows of a feed of the nodes' own that the last checkpoint covers, by epoch."""
        last = self.last_checkpoint
        return {} if last is None else last.covered(feed)

    @cached_property
    def _writer(self) -> _Writer:
        url = self._spec.checkpoint_dir
        if url is None:
            raise ConfigError(
                "ctx.checkpoint needs a place: launch the cluster with checkpoint_dir=..., a path "
                "or URL that all nodes reach"
            )
        if not self.member.role.is_trainer or self.member.role.is_server:
            raise ConfigError(
                f"{self.member.node.name} does not train: call ctx.checkpoint on chief and workers"
            )
        return _Writer(
            open_store(url, self._scratch),
            self._spec,
            self.world,
            self.member,
            self._link,
            self._resume,
        )


class _Writer:
    """This node's part in all checkpoints of a world."""

    def __init__(
        self,
        store: CheckpointStore,
        spec: ClusterSpec,
        world: World,
        member: Member,
        link: AgentLink,
        resume: Resume,
    ) -> None:
        self._store = store
        self._spec = spec
        self._generation = world.generation
        self._node = member.node.name
        self._leads = member.rank == 0
        self._link = link
        self._resumed = resume.checkpoint
        self._last_step: int | None = None
        self._is_open = False

    @contextmanager
    def write(self, step: int, batches: int | Mapping[str, int] | None) -> Iterator[Path]:
        """See `Checkpointing.checkpoint`."""
        self._check(step)
        feeds = self._link.positions(batches)
        name = CheckpointName(step, self._spec.cluster_id, self._generation)
        if self._leads and self._last_step is None:
            with suppress(OSError):
                self._store.sweep_unfinished(name)
        self._last_step, self._is_open = step, True
        folder: Path | None = None
        try:
            with self._named_errors(name):
                folder = self._store.open(name)
            with self._named_errors(name, is_users=True):
                yield folder
            with self._named_errors(name):
                self._store.finish(name, folder, self._node)
        except BaseException as error:
            problem = f"{type(error).__name__}: {error}"[:_MAX_PROBLEM_CHARS]
            self._store.give_up(name, folder, for_all=self._leads)
            self._link.send(Checkpointed(step, {}, problem))
            raise
        finally:
            self._is_open = False
        self._link.send(Checkpointed(step, feeds))
        if self._leads:
            self._complete(name)

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
                f"ctx.checkpoint({step}), but the feeds go on at step {self._resumed.step}: load "
                f"ctx.last_checkpoint and count on from its step. To begin anew, choose another "
                f"checkpoint_dir"
            )

    def _complete(self, name: CheckpointName) -> None:
        """Wait for the other nodes' parts, and make one checkpoint of them."""
        try:
            manifest = self._await_parts(name.step)
            with self._named_errors(name):
                url = self._store.commit(name, manifest)
        except BaseException:
            self._store.give_up(name, None, for_all=True)
            raise
        self._link.send(Committed(name.step, url))
        try:
            keep = self._spec.settings.keep_checkpoints
            self._store.sweep(name, keep, self._resumed.name if self._resumed else "")
        except OSError as error:
            _log.warning("Old checkpoints could not be deleted: %s", error)

    def _await_parts(self, step: int) -> Manifest:
        timeout_s = self._spec.settings.feed_timeout_s
        deadline = Deadline.after(timeout_s)
        missing: tuple[str, ...] = ()
        while (news := self._link.wait_commit(step, deadline)) is not None:
            if news.problem:
                raise CheckpointError(f"there is no checkpoint of step {step}: {news.problem}")
            if news.manifest:
                return msgspec.json.decode(news.manifest, type=Manifest)
            missing = news.missing
        who = ", ".join(missing) or "the driver"
        raise CheckpointError(
            f"there is no checkpoint of step {step}: within {timeout_s:g} s nothing came from "
            f"{who}. Call ctx.checkpoint on all nodes that train, with the same steps; "
            "feed_timeout is how long the first node waits"
        )

    @contextmanager
    def _named_errors(self, name: CheckpointName, is_users: bool = False) -> Iterator[None]:
        """Say of a disk's errors which checkpoint they hit, and that the others are well.

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
