"""Every error that sparkdl raises on purpose."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from sparkdl.core.failure import Failure
from sparkdl.core.texts import docs_page, listed

_Error = TypeVar("_Error", bound="SparkdlError")


class SparkdlError(Exception):
    """Base class: catch this to catch everything sparkdl raises on purpose.

    A traceback of it ends with where to read on, from Python 3.11 on. The link is a note rather
    than part of the text, because other errors, failures and log lines quote the text.
    """

    __notes__: list[str]

    def __new__(cls: type[_Error], *args: object, **kwargs: object) -> _Error:
        """Return an error that has the note."""
        error = super().__new__(cls, *args, **kwargs)
        error.__notes__ = [f"See {page_of(cls)}"]
        return error


class ConfigError(SparkdlError, ValueError):
    """The request cannot work as it was made; nothing was started.

    Example: four nodes were asked for on a cluster with two task slots.
    """


class SparkConfigError(ConfigError, RuntimeError):
    """Spark is missing, or Spark or its hosts lack a resource that was requested.

    Example: processes with GPUs on executors to which Spark gives none, or on hosts without.
    """


class FrameworkMissingError(SparkdlError, ImportError):
    """The framework that was asked for is missing, or is a version sparkdl cannot drive."""


class ReservationTimeoutError(SparkdlError, TimeoutError):
    """Not all nodes started in time.

    Example: another job holds the slots that two of the four nodes were waiting for.
    """


class FeedTimeoutError(SparkdlError, TimeoutError):
    """No row was received or consumed for the whole of the feed timeout."""


class UnfedError(FeedTimeoutError):
    """`map_fun` reads a feed that the driver never feeds.

    Example: a feed's name that differs between `ctx.batches` and `cluster.feed`.
    """


class FeedClosedError(SparkdlError):
    """A feed takes no more rows, or it was used after its cluster had ended."""


class EndOfFeedError(FeedClosedError):
    """`map_fun` asked for another epoch of a feed that has ended.

    Example: `cluster.feed(df, epochs=2)`, and a loop over five epochs.
    """


class FeedTypeError(SparkdlError, TypeError):
    """A row holds a value that cannot travel in the feed; the message names field and type."""


class ReadError(SparkdlError):
    """A node could not read a file of a data set, or the file has changed since it was planned."""


class RecordError(ReadError):
    """A record cannot be read: the file is damaged or ends early, or the record is another kind.

    Attributes:
        path: of the file.
        offset: of the record in it, in bytes.
    """

    def __init__(self, path: str, offset: int, reason: str) -> None:
        self.path = path
        self.offset = offset
        self.reason = reason
        super().__init__(f"{path}, byte {offset}: {reason}")

    # By default an exception is pickled with `args`, which `__init__` does not take.
    def __reduce__(self) -> tuple[type[RecordError], tuple[str, int, str]]:
        return type(self), (self.path, self.offset, self.reason)


class WriteError(SparkdlError):
    """Rows could not be written; existing data is unchanged."""


class CheckpointError(SparkdlError):
    """A checkpoint could not be made or read; those made before still are."""


class CoordinationError(SparkdlError):
    """Not all nodes made a call that takes all of them: one has returned, or is late."""


class InferenceError(SparkdlError):
    """A node answered an inference partition with too few or too many results."""


class ScorerLostError(InferenceError):
    """The process that runs a model for the task slots of an executor ended with rows unanswered.

    Example: the kernel has killed it, because the executor's memory was used up.
    """


class CollectiveError(SparkdlError, RuntimeError):
    """The nodes could not reduce or exchange values together.

    Example: one of them was lost, or called another operation than the others.
    """


class MismatchError(CollectiveError):
    """The nodes called different operations; nothing was exchanged, and they can continue."""


class ResultError(SparkdlError):
    """The value that `map_fun` returned cannot travel to the driver."""


class ProtocolError(SparkdlError):
    """The other side of a connection broke the protocol."""


class IllegalTransitionError(SparkdlError):
    """A state machine got an event that its state does not allow. Always a bug in sparkdl."""


class ShutdownTimeoutError(SparkdlError, TimeoutError):
    """`map_fun` had not returned within the timeout of the shutdown, and was stopped."""


class RemovedError(SparkdlError, NotImplementedError):
    """A call of another library that sparkdl lacks; the message names the replacement."""


class RemovedModuleError(RemovedError, ModuleNotFoundError):
    """A module of another library that sparkdl lacks; the message names the replacement."""


class LaunchError(SparkdlError):
    """The nodes could not be started: Spark's own job that carries them failed."""


class JobFailedError(SparkdlError):
    """A Spark job of a training without nodes failed; the message has what its task raised."""


class NodeFailedError(SparkdlError, RuntimeError):
    """One or more nodes failed. `failures` holds them all, the root cause first.

    Args:
        failures: at least one failure; sorted here, see `Failure.order`.
        note: why the cluster did not restart, in words.
    """

    def __init__(self, failures: Sequence[Failure], note: str = "") -> None:
        self.failures: tuple[Failure, ...] = tuple(sorted(failures, key=lambda f: f.order))
        self.note = note
        super().__init__(_describe(self.failures, note))

    # As for RecordError: `args` holds the text, and `__init__` takes the failures.
    def __reduce__(self) -> tuple[type[NodeFailedError], tuple[tuple[Failure, ...], str]]:
        return type(self), (self.failures, self.note)

    @property
    def root_cause(self) -> Failure:
        """The failure that the others followed from."""
        return self.failures[0]


class NodeLostError(NodeFailedError):
    """The root cause is a node that vanished (executor, agent or connection), not user code.

    Or the driver reaches the node, but feeders on another host do not.
    """


def page_of(kind: type[SparkdlError]) -> str:
    """Return the link to the section of an error, or of its nearest base that has one."""
    ours = next(each for each in kind.__mro__ if each.__module__ == __name__)
    return docs_page("troubleshooting", "" if ours is SparkdlError else ours.__name__.lower())


def in_words(error: BaseException) -> str:
    """Return the text of an error, preceded by its type unless sparkdl raised it."""
    return str(error) if isinstance(error, SparkdlError) else f"{type(error).__name__}: {error}"


def node_error(failures: Sequence[Failure], note: str = "") -> NodeFailedError:
    """Return the exception that fits the root cause among `failures`."""
    cause = min(failures, key=lambda failure: failure.order)
    is_lost = cause.kind in ("lost", "unreachable")
    return (NodeLostError if is_lost else NodeFailedError)(failures, note)


def _describe(failures: tuple[Failure, ...], note: str) -> str:
    if not failures:
        return "a node failed"
    text = failures[0].describe()
    if len(failures) > 1:
        others = listed([f"  then {failure.headline()}" for failure in failures[1:]], "\n")
        text += f"\nFailures that followed:\n{others}"
    if note:
        text += f"\nNot recovered: {note.rstrip('.')}."
    return text
