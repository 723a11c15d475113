"""Libraries compute in each of many children that one zygote forks, while the machine is busy."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from importlib.util import find_spec
from pathlib import Path

import cloudpickle
import numpy as np
import psutil
import pytest

from sparkdl.control.channel import Raised, Returned, Start, Unframer, receive, send
from sparkdl.control.descriptors import nameless_file
from sparkdl.control.values import decode_value
from sparkdl.core.settings import Environment
from sparkdl.core.spec import WORKER, ClusterSpec, NodeSpec
from sparkdl.core.world import Address, build_world
from sparkdl.frameworks.framework import TRAINING
from sparkdl.node.forking import (
    CAN_FORK,
    MAX_NBYTES,
    Exited,
    Forked,
    Place,
    Request,
    decode_answer,
)
from sparkdl.node.resources import reserve_port
from tests.doubles.computations import operands, product

pytestmark = [
    pytest.mark.deep,
    pytest.mark.skipif(not CAN_FORK, reason="zygotes are for Linux"),
]

FORKS = int(os.environ.get("FORKS", "60"))
"""For each library; a proof takes a thousand."""
MODELS = "transformers.models.bert.modeling_bert"
"""Imported by the first use of a model otherwise: by each child."""
IMPORT_S, CHILD_S = 300.0, 120.0
CORES = len(os.sched_getaffinity(0))


@pytest.fixture
def _busy_cores() -> Iterator[None]:
    command = [sys.executable, "-c", "while True: pass"]
    with ExitStack() as stack:
        for _ in range(CORES):
            stack.callback(stack.enter_context(subprocess.Popen(command)).kill)
        yield


class Children:
    """What one zygote forks for this process, and what becomes of it."""

    def __init__(self, place: Place, spec: ClusterSpec, folder: Path) -> None:
        self._place = place
        self._spec = spec
        self._folder = folder

    def compute(self, library: str, seed: int) -> list[float]:
        """Return what `product` returns in a child of its own."""
        (self._folder / str(seed)).mkdir()
        payload = self._folder / str(seed) / "payload"
        payload.write_bytes(cloudpickle.dumps((product, (library, seed))))
        ours, theirs = socket.socketpair()
        stacks, log = nameless_file("stacks"), nameless_file("log")
        try:
            with theirs:
                request = Request("child", node="worker:0", agent_pid=os.getpid())
                link = self._place.connect(request, (theirs.fileno(), stacks, log))
            with ours, link:
                link.settimeout(IMPORT_S)
                forked = decode_answer(link.recv(MAX_NBYTES))
                assert isinstance(forked, Forked), forked
                for sock in (ours, link):
                    sock.settimeout(CHILD_S)
                try:
                    value = self._value(ours, payload)
                    assert decode_answer(link.recv(MAX_NBYTES)) == Exited(0)
                except TimeoutError:
                    raise AssertionError(_where(forked.pid, stacks)) from None
                return value
        finally:
            os.close(stacks)
            os.close(log)

    def _value(self, sock: socket.socket, payload: Path) -> list[float]:
        (node,) = self._spec.nodes
        with reserve_port("127.0.0.1", Environment()) as port:
            world = build_world(0, {node: Address("127.0.0.1", port.getsockname()[1], "")})
            send(sock, Start(world, 0, self._spec, payload=str(payload)), port.fileno())
        unframer, value = Unframer(), None
        while (messages := receive(sock, unframer)) is not None:
            for message, _fd in messages:
                assert not isinstance(message, Raised), message.failure.describe()
                if isinstance(message, Returned):
                    value = decode_value(message.result)
        assert value is not None, "the child ended without a word"
        return list(value)


def _where(pid: int, stacks: int) -> str:
    """Return the Python and the native stacks of a child that hangs."""
    os.kill(pid, signal.SIGUSR1)
    threading.Event().wait(1.0)
    text = os.pread(stacks, MAX_NBYTES, 0).decode(errors="replace")
    if gdb := shutil.which("gdb"):
        command = [gdb, "-p", str(pid), "-batch", "-ex", "thread apply all backtrace"]
        text += subprocess.run(command, capture_output=True, text=True, timeout=CHILD_S).stdout
    return f"child {pid} has not ended within {CHILD_S:g} s:\n{text}"


@pytest.mark.parametrize(
    ("library", "framework"),
    [
        ("numpy", "plain"),
        *(pytest.param(name, name, marks=getattr(pytest.mark, name)) for name in TRAINING),
        *(pytest.param("keras", name, marks=getattr(pytest.mark, name)) for name in TRAINING),
        pytest.param("transformers", "torch", marks=pytest.mark.torch),
    ],
)
@pytest.mark.usefixtures("_busy_cores")
def test_a_library_computes_in_each_of_many_children(
    library: str, framework: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    monkeypatch.setenv("KERAS_BACKEND", framework)
    preload = [MODELS if library == "transformers" else library]
    place = Place.of("a key", os.getpid(), os.environ, framework, preload)
    assert place is not None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # an agent does not wait for a zygote
        held = place.connect(Request("hold"))
    (zygote,) = (p for p in psutil.Process().children() if "sparkdl.node.zygote" in p.cmdline())
    children = Children(place, ClusterSpec("c", (NodeSpec(0, WORKER, 0),), framework), tmp_path)
    with closing(held), ThreadPoolExecutor(2 * CORES) as pool:
        computed = pool.map(lambda seed: children.compute(library, seed), range(FORKS))
        for seed, sums in enumerate(computed):
            a, b = operands(seed)
            np.testing.assert_allclose(sums, (a @ b).sum(0), rtol=1e-4)
    zygote.wait(CHILD_S)
