"""Errors are what they say they are, survive pickling, and name the root cause first."""

from __future__ import annotations

import pickle
import sys
import traceback
from importlib import import_module
from itertools import permutations

import pytest
from hypothesis import example, given, strategies as st

from sparkdl.core import errors
from sparkdl.core.errors import NodeFailedError, NodeLostError, SparkdlError, node_error
from sparkdl.core.failure import Code, Failure

ALSO = {
    "ConfigError": ValueError,
    "FrameworkMissingError": ImportError,
    "ReservationTimeoutError": TimeoutError,
    "FeedTimeoutError": TimeoutError,
    "ShutdownTimeoutError": TimeoutError,
    "FeedTypeError": TypeError,
    "NodeFailedError": RuntimeError,  # as pyspark's TorchDistributor and Horovod raise
    "NodeLostError": NodeFailedError,
    "RemovedModuleError": ModuleNotFoundError,
    "SparkConfigError": RuntimeError,
}
"""What each error is besides, so that code which knows nothing of sparkdl can catch it."""

CLASSES = [
    value
    for value in vars(errors).values()
    if isinstance(value, type) and issubclass(value, SparkdlError)
]

EARLY = Failure("worker:0", "exception", "ValueError: no", 10.0, node_id=0, rank=1, host="a", pid=7)
LATER = Failure("chief:0", "exit", "", 11.0, node_id=1, rank=0, host="b", pid=8, exit_code=3)
LOST = Failure("ps:0", "lost", "its connection closed", 12.0, node_id=2, rank=2, host="c", pid=9)

GIVEN: dict[type[SparkdlError], tuple[object, ...]] = {
    NodeFailedError: ([LATER, EARLY],),
    errors.RecordError: ("file", 7, "why"),
    SparkdlError: ("what; where; why",),
}
"""What an error is made of; the first base of it counts."""


class _Inner(errors.FeedClosedError):
    """Of another module, and not on the page."""


def test_traceback_ends_with_where_to_read_and_the_text_is_as_it_was() -> None:
    error = _Inner("no more rows")
    copy = pickle.loads(pickle.dumps(error))  # noqa: TID251 (its own)
    assert str(error) == "no more rows"
    for each in (error, copy):
        assert each.__notes__ == ["See docs/troubleshooting.md#feedclosederror"]
    assert SparkdlError("what").__notes__ == ["See docs/troubleshooting.md"]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python prints notes from 3.11 on")
def test_python_prints_where_to_read_once() -> None:
    told = "".join(traceback.format_exception(node_error([EARLY], "it is the end")))
    assert told.endswith(
        "\nNot recovered: it is the end.\nSee docs/troubleshooting.md#nodefailederror\n"
    )
    assert told.count("See docs/") == 1


@pytest.mark.parametrize("cls", CLASSES)
def test_error_survives_a_pickle(cls: type[SparkdlError]) -> None:
    error = cls(*next(each for base, each in GIVEN.items() if issubclass(cls, base)))
    copy = pickle.loads(pickle.dumps(error))  # noqa: TID251 (its own)
    assert type(copy) is cls
    assert str(copy) == str(error)
    assert copy.args == error.args
    assert vars(copy) == vars(error)


@pytest.mark.parametrize("cls", CLASSES)
def test_error_is_also_the_builtin_that_callers_know(cls: type[SparkdlError]) -> None:
    assert getattr(import_module("sparkdl.errors"), cls.__name__) is cls, "their public name"
    assert issubclass(cls, ALSO.get(cls.__name__, SparkdlError))


@pytest.mark.parametrize("order", list(permutations([EARLY, LATER, LOST])))
def test_the_failure_that_happened_first_is_the_root_cause_in_whatever_order_they_came(
    order: tuple[Failure, ...],
) -> None:
    error = NodeFailedError(order)
    assert error.failures == (EARLY, LATER, LOST)
    assert error.root_cause is EARLY


def test_what_says_that_another_node_is_gone_is_no_root_cause_if_that_one_is_known() -> None:
    broken = Failure("worker:2", "exception", "reset by peer", 0.0, is_consequence=True)
    assert NodeFailedError([broken, LATER, EARLY]).failures == (EARLY, LATER, broken)
    assert NodeFailedError([broken]).root_cause is broken
    assert type(node_error([broken, LOST])) is NodeLostError


def test_message_tells_the_first_failure_whole_and_the_others_in_a_line_each() -> None:
    assert str(NodeFailedError([LOST, LATER, EARLY])) == (
        f"{EARLY.describe()}\n"
        "Failures that followed:\n"
        "  then chief:0 (rank 0, pid 8) on b ended with exit code 3.\n"
        "  then ps:0 (rank 2, pid 9) on c was lost: its connection closed"
    )


@pytest.mark.parametrize(
    ("failures", "cls"),
    [
        ([EARLY, LOST], NodeFailedError),
        ([LOST, EARLY], NodeFailedError),
        ([LOST], NodeLostError),
        ([Failure("ps:0", "exit", "", 13.0), LOST], NodeLostError),
    ],
)
def test_node_is_lost_only_if_that_came_first(
    failures: list[Failure], cls: type[NodeFailedError]
) -> None:
    assert type(node_error(failures)) is cls


texts = st.text()


@given(st.sampled_from(Code), st.lists(texts, max_size=3), texts, texts)
@example(Code.RAISED, ["ConfigError", 'ends with "]'], "", '"]')
@example(Code.RAISED, ["ConfigError", "C:\\"], "", "")
@example(Code.RAISED, ["ConfigError", '\\"] \\\\'], "", "")
@example(Code.RAISED, ["ConfigError", "lines\nand\ttabs \u2028"], "", "")
def test_a_code_is_found_again_in_any_text_around_it(
    code: Code, values: list[str], before: str, after: str
) -> None:
    text = f"{before}\n{code.mark(*values)}\n{after}"
    assert code.values_in(text) == tuple(values)
    assert [each for each in Code if each.is_in(RuntimeError(text))] == [code]


@pytest.mark.parametrize("text", ['[SPARKDL-RAISED "a"', '[SPARKDL-RAISED "a]', "SPARKDL-RAISED"])
def test_half_a_code_is_none(text: str) -> None:
    assert not Code.RAISED.is_in(text)
