"""A child with the test in the place of its agent: a process of its own, or this one."""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from sparkdl.control import channel
from sparkdl.control.messages import MAX_MESSAGE_NBYTES, ChildReturned, ChildRunning
from sparkdl.control.values import decode_value
from sparkdl.core.failure import Failure
from sparkdl.core.settings import Environment
from sparkdl.core.spec import WORKER, ClusterSpec, NodeSpec
from sparkdl.core.world import Address, build_world
from sparkdl.node import child, context
from sparkdl.node.child import user_traceback
from sparkdl.node.context import NodeContext
from sparkdl.node.link import AgentLink
from sparkdl.node.resources import reserve_port
from sparkdl.node.supervisor import Child, ChildSpec
from tests.doubles.frameworks import IS_MISSING, LOSES_PORTS, LOSES_PORTS_EARLY
from tests.doubles.nodes import SOON_S
from tests.doubles.programs import output_of

MapFun = Callable[[Any, NodeContext], Any]
Outcome = ChildReturned | channel.Raised


def begin(agents: socket.socket, payload: Path, spec: ClusterSpec) -> None:
    """Tell a child, as its agent does, that the world begins."""
    (node,) = spec.nodes
    with reserve_port("127.0.0.1", Environment()) as port:
        world = build_world(5, {node: Address("127.0.0.1", port.getsockname()[1], "")})
        start = channel.Start(world, 0, spec, payload=str(payload))
        channel.send(agents, start, port.fileno())


def spec_of(framework: str = "plain", **options: Any) -> ClusterSpec:
    return ClusterSpec("c", (NodeSpec(0, WORKER, 0),), framework=framework, **options)


def add(args: dict[str, int], ctx: NodeContext) -> tuple[int, int, list[str]]:
    return args["a"] + 1, ctx.generation, sys.argv


def test_process_says_that_it_runs_and_returns_in_this_order(tmp_path: Path) -> None:
    payload = tmp_path / "payload"
    payload.write_bytes(cloudpickle.dumps((add, {"a": 41})))
    process = Child.spawn(ChildSpec("plain", {"PYTHONUNBUFFERED": "1"}))
    try:
        process.sock.settimeout(SOON_S)
        begin(process.sock, payload, spec_of())
        unframer = channel.Unframer()
        said: list[channel.Local] = []
        while (some := channel.receive(process.sock, unframer)) is not None:
            said.extend(message for message, _fd in some if not isinstance(message, channel.Waited))
    finally:
        process.signal_group(signal.SIGKILL)
        assert process._process is not None
        process._process.wait(SOON_S)
        process.close()
    entered, returned = said
    assert isinstance(entered, ChildRunning)
    assert isinstance(returned, ChildReturned)
    assert not returned.has_exited
    result, generation, (program, *arguments) = decode_value(returned.result)
    assert (result, generation) == (42, 5)
    assert program.endswith("child.py")  # arguments that are no list leave sys.argv alone
    assert arguments[3:] == ["plain"]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Outcome]]:
    """A function that does what a child does between its start and its last words.

    Without a `map_fun` no world begins.
    """
    environ = dict(os.environ)
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(gc, "freeze", lambda: None)
    monkeypatch.setattr(context, "_current", None)

    def outcome(
        map_fun: MapFun | bytes | None,
        args: Any = None,
        framework: str = "plain",
        preload: tuple[str, ...] = (),
        **options: Any,
    ) -> Outcome:
        payload, ports = tmp_path / "payload", list[socket.socket]()
        agents, child_end = socket.socketpair()
        link = AgentLink(child_end)

        def wait_start(*then: Any, wait: Callable[..., Any] = link.wait_start) -> Any:
            start, port = wait(*then)
            ports.append(port)
            return start, port

        monkeypatch.setattr(link, "wait_start", wait_start)
        with agents:
            if map_fun is not None:
                code = (map_fun, args)
                payload.write_bytes(
                    map_fun if isinstance(map_fun, bytes) else cloudpickle.dumps(code)
                )
                begin(agents, payload, spec_of(framework, **options))
            try:
                return child._run(partial(child.import_all, framework, preload), link)
            finally:
                link.close()
                for port in ports:
                    port.close()

    yield outcome
    os.environ.clear()
    os.environ.update(environ)


Run = Callable[..., Outcome]


def value_of(outcome: Outcome) -> Any:
    assert isinstance(outcome, ChildReturned), outcome
    return decode_value(outcome.result)


def failure_of(outcome: Outcome) -> Failure:
    assert isinstance(outcome, channel.Raised), outcome
    return outcome.failure


@pytest.mark.parametrize(("code", "expected"), [(5, 5), ("out of luck", 1)])
def test_sys_exit_with_a_code_is_a_failure(run: Run, code: int | str, expected: int) -> None:
    def leave(args: int | str, ctx: NodeContext) -> None:
        raise SystemExit(args)

    failure = failure_of(run(leave, code))
    assert (failure.kind, failure.exit_code) == ("exit", expected)
    assert str(code) in failure.message


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_whatever_is_raised_is_told_once_with_the_users_frames_alone(
    run: Run, error: type[BaseException], capfd: pytest.CaptureFixture[str]
) -> None:
    def deep(args: type[BaseException], ctx: NodeContext) -> None:
        raise args("no such luck")

    failure = failure_of(run(deep, error))
    assert failure.kind == "exception"
    assert failure.exception_type == f"builtins.{error.__name__}"
    assert failure.message == f"{error.__name__}: no such luck"
    head, frame, *_, last = failure.traceback.splitlines()
    assert head == "Traceback (most recent call last):"
    assert frame.endswith(", in deep"), "the first frame is the user's"
    assert last == failure.message
    assert failure.pid == os.getpid()
    assert capfd.readouterr() == ("", ""), "the agent adds it, behind what the child has printed"


def test_error_has_no_colours_of_terminals(run: Run) -> None:
    def fail(args: None, ctx: NodeContext) -> None:
        raise ValueError("Exception encountered.\n\x1b[1mCannot take the length\x1b[0m")

    failure = failure_of(run(fail))
    assert failure.message == "ValueError: Exception encountered.\nCannot take the length"
    assert "\x1b" not in failure.traceback


def test_code_that_cannot_be_unpickled_is_a_failed_setup(run: Run) -> None:
    payload = b"csome_module_of_the_driver\ntrain\n."
    failure = failure_of(run(payload))
    assert failure.kind == "setup"
    first, advice = failure.message.splitlines()
    assert first == "ModuleNotFoundError: No module named 'some_module_of_the_driver'"
    for way in ("Install it on all", "addPyFile('some_mod", "register_pickle_by_value(some_mod"):
        assert way in advice


def test_missing_framework_is_told_before_there_is_a_world(run: Run) -> None:
    failure = failure_of(run(None, framework=IS_MISSING))
    assert failure.kind == "setup"
    assert "frobnicate 3 cannot be imported" in failure.message


def test_modules_to_preload_precede_the_world(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def loaded(args: None, ctx: NodeContext) -> list[bool]:
        return [name in sys.modules for name in ("wsgiref.simple_server", "turtle")]

    for name in ("wsgiref.simple_server", "turtle"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert value_of(run(loaded, preload=("wsgiref.simple_server",))) == [True, False]


def test_module_that_cannot_be_preloaded_is_a_failed_setup_that_names_it(run: Run) -> None:
    failure = failure_of(run(None, preload=("wsgiref", "frobnicate.core")))
    assert failure.kind == "setup"
    assert "names 'frobnicate.core', which cannot be imported" in failure.message


@pytest.mark.parametrize(
    ("framework", "kind"),
    [(LOSES_PORTS, "port"), (LOSES_PORTS_EARLY, "port"), ("plain", "exception")],
)
def test_lost_port_is_what_the_framework_takes_for_one(run: Run, framework: str, kind: str) -> None:
    def bind(args: None, ctx: NodeContext) -> None:
        raise OSError("address already in use")

    assert failure_of(run(bind, framework=framework)).kind == kind


@pytest.mark.parametrize("release_port", [True, False])
def test_port_is_released_before_map_fun_unless_it_is_kept(run: Run, release_port: bool) -> None:
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

    assert value_of(run(try_port, release_port=release_port)) == [release_port, True]


def test_value_too_large_for_a_message_is_a_problem_and_no_failure(run: Run) -> None:
    returned = run(lambda args, ctx: b"x" * args, MAX_MESSAGE_NBYTES)
    assert isinstance(returned, ChildReturned)
    assert returned.result == b""
    assert "Save it to a file in map_fun" in returned.result_problem


def test_story_of_a_failure_is_cut_to_what_travels(run: Run) -> None:
    def complain(args: int, ctx: NodeContext) -> None:
        raise ValueError("first words " + "x" * args + " last words")

    failure = failure_of(run(complain, MAX_MESSAGE_NBYTES))
    assert len(failure.message) + len(failure.traceback) < MAX_MESSAGE_NBYTES // 16
    assert failure.message.startswith("ValueError: first words xxx")
    assert failure.traceback.rstrip().endswith("last words")


OURS = str(child.__file__).removesuffix("child.py") + "made_up.py"


def through_us(call: Callable[[], Any]) -> BaseException:
    """Return what `call` raises when a frame of sparkdl's has called it."""
    code = compile("def begin(call):\n    call()\n", OURS, "exec")
    names: dict[str, Any] = {}
    exec(code, names)
    try:
        names["begin"](call)
    except Exception as error:  # noqa: BLE001 (whatever it is)
        error.__traceback__ = error.__traceback__.tb_next  # type: ignore[union-attr]  # this one
        return error
    raise AssertionError("nothing was raised")


def divide() -> None:
    raise ZeroDivisionError("by zero")


def names_of(text: str) -> list[str]:
    return [line.rpartition(" in ")[2] for line in text.splitlines() if line.startswith("  File")]


def test_frames_that_led_to_the_users_code_are_left_out() -> None:
    error = through_us(divide)
    assert names_of("".join(traceback.format_exception(error))) == ["begin", "divide"]
    assert names_of(user_traceback(error)) == ["divide"]
    assert user_traceback(error).endswith("ZeroDivisionError: by zero\n")


_STEPS = """
import resource
import numpy as np
from sparkdl.node.child import keep_freed_memory

def step():
    arrays = [np.ones(25 << 20, np.uint8) for _ in range(3)]

keep_freed_memory()
step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="it is about glibc")
def test_freed_memory_is_used_again_without_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GLIBC_TUNABLES", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"):
        monkeypatch.delenv(name, raising=False)
    assert int(output_of(sys.executable, "-c", _STEPS)) < 100
