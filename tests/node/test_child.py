"""The framework process, with the test in the place of its agent."""

from __future__ import annotations

import signal
import socket
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import cloudpickle
import psutil
import pytest

from sparkdl.control import channel
from sparkdl.control.messages import MAX_MESSAGE_NBYTES, ChildReturned, ChildRunning
from sparkdl.control.values import decode_value
from sparkdl.core.failure import Failure
from sparkdl.core.settings import Environment
from sparkdl.core.spec import WORKER, ClusterSpec, NodeSpec
from sparkdl.core.world import Address, build_world
from sparkdl.node.context import NodeContext
from sparkdl.node.resources import reserve_port
from sparkdl.node.supervisor import Child, ChildSpec
from tests.doubles.frameworks import IS_MISSING, LOSES_PORTS, LOSES_PORTS_EARLY
from tests.doubles.nodes import SOON_S

MapFun = Callable[[Any, NodeContext], Any]


class Node:
    def __init__(self, child: Child, spec: ClusterSpec, payload: Path) -> None:
        self.child = child
        self.process = psutil.Process(child.pid)
        self.log = child.log
        self._spec = spec
        self._payload = payload
        child.sock.settimeout(SOON_S)

    def begin(self) -> None:
        (node,) = self._spec.nodes
        with reserve_port("127.0.0.1", Environment()) as port:
            address = Address("127.0.0.1", port.getsockname()[1], "")
            world = build_world(5, {node: address})
            start = channel.Start(world, 0, self._spec, payload=str(self._payload))
            channel.send(self.child.sock, start, port.fileno())

    def messages(self) -> list[channel.Local]:
        """Wait for the end of the pipe; return what the child said, but for how long it waited."""
        unframer = channel.Unframer()
        said: list[channel.Local] = []
        while (some := channel.receive(self.child.sock, unframer)) is not None:
            said.extend(message for message, _fd in some if not isinstance(message, channel.Waited))
        return said

    def outcome(self) -> channel.Local:
        self.begin()
        return self.messages()[-1]

    def value(self) -> Any:
        returned = self.outcome()
        assert isinstance(returned, ChildReturned), returned
        return decode_value(returned.result)

    def failure(self) -> Failure:
        raised = self.outcome()
        assert isinstance(raised, channel.Raised), raised
        return raised.failure


def end_of(child: Child) -> None:
    assert child._process is not None
    child._process.wait(SOON_S)


StartNode = Callable[..., Node]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[StartNode]:
    with ExitStack() as stack:

        def start_child(
            map_fun: MapFun | bytes,
            args: Any = None,
            framework: str = "plain",
            release_port: bool = True,
            preload: tuple[str, ...] = (),
        ) -> Node:
            payload = tmp_path / "payload"
            payload.write_bytes(
                map_fun if isinstance(map_fun, bytes) else cloudpickle.dumps((map_fun, args))
            )
            environment = {"PYTHONUNBUFFERED": "1"}
            child = Child.spawn(ChildSpec(framework, environment, preload))
            stack.callback(child.close)
            stack.callback(end_of, child)
            stack.callback(child.signal_group, signal.SIGKILL)
            spec = ClusterSpec(
                "c", (NodeSpec(0, WORKER, 0),), framework=framework, release_port=release_port
            )
            return Node(child, spec, payload)

        yield start_child


def test_says_that_it_runs_and_returns_in_this_order(start: StartNode) -> None:
    def add(args: dict[str, int], ctx: NodeContext) -> tuple[int, int, str]:
        return args["a"] + 1, ctx.generation, sys.argv[0]

    running = start(add, {"a": 41})
    running.begin()
    *before, returned = running.messages()
    (entered,) = before
    assert isinstance(entered, ChildRunning)
    assert isinstance(returned, ChildReturned)
    assert not returned.has_exited
    value = decode_value(returned.result)
    assert value[:2] == (42, 5)
    assert value[2].endswith("child.py")  # arguments that are no list leave sys.argv alone


def test_list_of_arguments_becomes_argv(start: StartNode) -> None:
    def argv(args: list[str], ctx: NodeContext) -> list[str]:
        assert args is sys.argv
        return sys.argv

    assert start(argv, ["train.py", "--steps", "3"]).value() == ["train.py", "--steps", "3"]


@pytest.mark.parametrize("code", [0, None])
def test_sys_exit_without_a_code_returns_none(start: StartNode, code: int | None) -> None:
    def leave(args: int | None, ctx: NodeContext) -> None:
        ArgumentParser().exit(args or 0)

    returned = start(leave, code).outcome()
    assert isinstance(returned, ChildReturned)
    assert decode_value(returned.result) is None
    assert returned.has_exited


@pytest.mark.parametrize(("code", "expected"), [(5, 5), ("out of luck", 1)])
def test_sys_exit_with_a_code_is_a_failure(
    start: StartNode, code: int | str, expected: int
) -> None:
    def leave(args: int | str, ctx: NodeContext) -> None:
        raise SystemExit(args)

    failure = start(leave, code).failure()
    assert (failure.kind, failure.exit_code) == ("exit", expected)
    assert str(code) in failure.message


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_whatever_is_raised_is_told_once_with_the_users_frames_alone(
    start: StartNode, error: type[BaseException]
) -> None:
    def deep(args: type[BaseException], ctx: NodeContext) -> None:
        raise args("no such luck")

    running = start(deep, error)
    failure = running.failure()
    assert failure.kind == "exception"
    assert failure.exception_type == f"builtins.{error.__name__}"
    assert failure.message == f"{error.__name__}: no such luck"
    head, frame, *_, last = failure.traceback.splitlines()
    assert head == "Traceback (most recent call last):"
    assert frame.endswith(", in deep"), "the first frame is the user's"
    assert last == failure.message
    assert failure.pid == running.child.pid
    assert running.log.tail(3) == (), "the agent adds it, behind what the child has printed"


def test_error_has_no_colours_of_terminals(start: StartNode) -> None:
    def fail(args: None, ctx: NodeContext) -> None:
        raise ValueError("Exception encountered.\n\x1b[1mCannot take the length\x1b[0m")

    failure = start(fail).failure()
    assert failure.message == "ValueError: Exception encountered.\nCannot take the length"
    assert "\x1b" not in failure.traceback


def test_code_that_cannot_be_unpickled_is_a_failed_setup(start: StartNode) -> None:
    payload = b"csome_module_of_the_driver\ntrain\n."
    failure = start(payload).failure()
    assert failure.kind == "setup"
    first, advice = failure.message.splitlines()
    assert first == "ModuleNotFoundError: No module named 'some_module_of_the_driver'"
    for way in ("Install it on all", "addPyFile('some_mod", "register_pickle_by_value(some_mod"):
        assert way in advice


def test_missing_framework_is_told_before_there_is_a_world(start: StartNode) -> None:
    (raised,) = start(print, framework=IS_MISSING).messages()
    assert isinstance(raised, channel.Raised)
    assert raised.failure.kind == "setup"
    assert "frobnicate 3 cannot be imported" in raised.failure.message


def test_modules_to_preload_are_there_before_the_world(start: StartNode) -> None:
    def loaded(args: None, ctx: NodeContext) -> list[bool]:
        return [name in sys.modules for name in ("wsgiref.simple_server", "turtle")]

    running = start(loaded, preload=("wsgiref.simple_server",))
    assert running.value() == [True, False]


def test_module_that_cannot_be_preloaded_is_a_failed_setup_that_names_it(start: StartNode) -> None:
    (raised,) = start(print, preload=("wsgiref", "frobnicate.core")).messages()
    assert isinstance(raised, channel.Raised)
    assert raised.failure.kind == "setup"
    assert "names 'frobnicate.core', which cannot be imported" in raised.failure.message


@pytest.mark.parametrize(
    ("framework", "kind"),
    [(LOSES_PORTS, "port"), (LOSES_PORTS_EARLY, "port"), ("plain", "exception")],
)
def test_lost_port_is_what_the_framework_takes_for_one(
    start: StartNode, framework: str, kind: str
) -> None:
    def bind(args: None, ctx: NodeContext) -> None:
        raise OSError("address already in use")

    assert start(bind, framework=framework).failure().kind == kind


@pytest.mark.parametrize("release_port", [True, False])
def test_port_is_released_before_map_fun_unless_it_is_to_be_kept(
    start: StartNode, release_port: bool
) -> None:
    def try_port(args: None, ctx: NodeContext) -> list[bool]:
        def is_free() -> bool:
            with socket.socket() as server:
                try:
                    server.bind((ctx.member.host, ctx.member.port))
                except OSError:
                    return False
                return True

        before = is_free()
        if ctx.tmp_socket is not None:
            ctx.release_port()
        return [before, is_free()]

    running = start(try_port, release_port=release_port)
    running.begin()
    returned = running.messages()[-1]
    assert isinstance(returned, ChildReturned)
    assert decode_value(returned.result) == [release_port, True]


def test_value_too_large_for_a_message_is_a_problem_and_no_failure(start: StartNode) -> None:
    returned = start(lambda args, ctx: b"x" * args, MAX_MESSAGE_NBYTES).outcome()
    assert isinstance(returned, ChildReturned)
    assert returned.result == b""
    assert "Save it to a file in map_fun" in returned.result_problem


def test_story_of_a_failure_is_cut_to_what_travels(start: StartNode) -> None:
    def complain(args: int, ctx: NodeContext) -> None:
        raise ValueError("first words " + "x" * args + " last words")

    failure = start(complain, MAX_MESSAGE_NBYTES).failure()
    assert len(failure.message) + len(failure.traceback) < MAX_MESSAGE_NBYTES // 16
    assert failure.message.startswith("ValueError: first words xxx")
    assert failure.traceback.rstrip().endswith("last words")
