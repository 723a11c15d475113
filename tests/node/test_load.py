"""What a node's child takes of its machine is told while somebody looks, its own processes' too."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys

import pytest

from sparkdl.control.messages import NodeLoad
from sparkdl.node.observation import LoadWatch
from tests.doubles.nvml import Device, Nvml

HUNGRY = "import subprocess, sys; block = bytearray(64 << 20); print(1, flush=True); {}"
CHILD = "subprocess.run([sys.executable, '-c', sys.argv[1]])"
PARENT = HUNGRY.format(CHILD)
GRANDCHILD = HUNGRY.format("sys.stdin.read(); [None for _ in iter(int, 1)]")


def test_memory_and_cores_of_a_child_and_its_own_processes_are_told() -> None:
    told: list[NodeLoad] = []
    process = subprocess.Popen(
        [sys.executable, "-c", PARENT, GRANDCHILD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdin
    assert process.stdout
    assert process.stdout.readline() + process.stdout.readline() == b"1\n1\n"

    async def look() -> None:
        loop, is_busy = asyncio.get_running_loop(), asyncio.Event()

        def report(load: NodeLoad) -> None:
            told.append(load)
            if load.cores > 0.1:
                is_busy.set()

        watch = LoadWatch(loop, report, (), lambda: (3, 10))
        watch.begin(lambda: process.pid)
        process.stdin.close()  # type: ignore[union-attr]
        await asyncio.wait_for(is_busy.wait(), 40)
        watch.close()

    try:
        asyncio.run(look())
    finally:
        subprocess.run(["pkill", "-KILL", "-s", str(process.pid)], check=True)
        process.wait(20)
        process.stdout.close()
    assert told[0].memory_nbytes > 2 * 64 << 20
    assert (told[0].feed_nbytes, told[0].feed_limit_nbytes) == (3, 10)


@pytest.mark.parametrize("gpus", [("GPU-a", "GPU-c"), ("0", "2")])
def test_gpus_are_told_of_by_their_uuids_and_by_the_numbers_that_spark_assigns(
    monkeypatch: pytest.MonkeyPatch, gpus: tuple[str, ...]
) -> None:
    devices = [
        Device("H100", uuid=f"GPU-{one}", used_nbytes=nbytes, percent=percent)
        for one, nbytes, percent in (("a", 1, 80), ("b", 10, 90), ("c", 100, 40))
    ]
    monkeypatch.setitem(sys.modules, "pynvml", Nvml(*devices))
    told: list[NodeLoad] = []

    async def look() -> None:
        watch = LoadWatch(asyncio.get_running_loop(), told.append, gpus, lambda: (0, 0))
        watch.begin(os.getpid)
        watch.close()

    asyncio.run(look())
    (load,) = told
    assert load.gpu == pytest.approx(0.6)
    assert load.gpu_nbytes == 101
