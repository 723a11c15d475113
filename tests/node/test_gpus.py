"""Which GPUs a node gets: Spark's, or claimed ones that no other node has; never too few."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from sparkdl.core.errors import FrameworkMissingError, SparkConfigError
from sparkdl.node import gpus
from tests.doubles.nodes import SOON_S
from tests.doubles.nvml import Device, Nvml, new_uuid

H100 = "NVIDIA H100 80GB HBM3"
NOTHING: dict[str, str] = {}
HOLDER = """\
import sys
from sparkdl.node.gpus import claim_gpu
claim = claim_gpu(sys.argv[1])
print("claimed" if claim else "refused", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """A function that gives this host GPUs, and returns their UUIDs."""

    def make(*devices: Device, has_package: bool = True) -> list[str]:
        monkeypatch.setattr(gpus, "has_driver", lambda: True)
        monkeypatch.setitem(sys.modules, "pynvml", Nvml(*devices) if has_package else None)
        return [device.uuid for device in devices]

    return make


@pytest.fixture
def share() -> Iterator[Callable[..., gpus.GpuShare]]:
    """`share_gpus` for a worker, whose claims end with the test."""
    with ExitStack() as stack:

        def take(wanted: int | None, *, environ: dict[str, str] = NOTHING) -> gpus.GpuShare:
            taken = gpus.share_gpus(wanted, None, "worker:1", environ, wait_s=0)
            stack.callback(taken.close)
            return taken

        yield take


def seen(share: gpus.GpuShare) -> list[str]:
    return share.environment["CUDA_VISIBLE_DEVICES"].split(",")


# what Spark assigned


@pytest.mark.parametrize(
    ("wanted", "assigned", "visible", "confined"),
    [
        (None, ("1", "3"), "1,3", "5,GPU-b"),
        (1, ("1", "3"), "1", "5"),
        (2, ("1", "3"), "1,3", "5,GPU-b"),
        (None, ("GPU-8932f937",), "GPU-8932f937", "GPU-8932f937"),
        (None, (), "", ""),
    ],
)
def test_gpus_of_spark_are_numbers_among_those_that_the_executor_sees(
    wanted: int | None, assigned: tuple[str, ...], visible: str, confined: str
) -> None:
    for environ, seen in (({}, visible), ({"CUDA_VISIBLE_DEVICES": "4,5,6,GPU-b"}, confined)):
        share = gpus.share_gpus(wanted, assigned, "worker:0", environ)
        order = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        assert share == gpus.GpuShare({"CUDA_VISIBLE_DEVICES": seen, **order})


def test_gpu_of_spark_that_the_executor_does_not_see_is_refused_or_stays_hidden() -> None:
    with pytest.raises(SparkConfigError, match=r"Spark assigned GPU 1, and .* sees 1 GPUs"):
        gpus.share_gpus(None, ("1",), "worker:0", {"CUDA_VISIBLE_DEVICES": "4"})
    hidden = {"CUDA_VISIBLE_DEVICES": "-1,2"}
    assert seen(gpus.share_gpus(None, ("1",), "worker:0", hidden)) == [""]
    with pytest.raises(SparkConfigError, match="CUDA_VISIBLE_DEVICES of its executor hides all"):
        gpus.share_gpus(1, ("1",), "worker:0", hidden)


def test_more_than_spark_assigned_is_refused_with_the_setting_to_change() -> None:
    with pytest.raises(SparkConfigError) as refused:
        gpus.share_gpus(3, ("1", "5"), "worker:0")
    assert str(refused.value).startswith(
        f"worker:0 on host {socket.gethostname()} was to have 3 GPUs (num_gpus=3), and Spark "
        "assigned 2 to its task: 1, 5. "
    )
    assert "raise spark.task.resource.gpu.amount" in str(refused.value)


def test_no_gpu_is_seen_where_none_is_wanted(host: Any) -> None:
    host(Device(H100))
    for assigned in (None, (), ("0", "1")):
        assert gpus.share_gpus(0, assigned, "ps:0") == gpus.GpuShare({"CUDA_VISIBLE_DEVICES": ""})


@pytest.mark.parametrize(
    ("assigned", "nodes", "parts"),
    [
        ("0123", 2, [("0", "1"), ("2", "3")]),
        ("012", 2, [("0",), ("1",)]),
        ("01", 1, [("0", "1")]),
        ("0", 2, [(), ()]),
        ("", 2, [(), ()]),
        ("01", 0, []),
    ],
)
def test_nodes_inside_one_task_share_no_gpu(
    assigned: str, nodes: int, parts: list[tuple[str, ...]]
) -> None:
    assert gpus.split_gpus(tuple(assigned), nodes) == parts


# claims


def test_nodes_of_a_host_get_different_gpus_whatever_their_product_is_called(
    host: Any, share: Any
) -> None:
    names = (H100, "Tesla", "NVIDIA GeForce RTX 3090", "NVIDIA A100 80GB PCIe", H100)
    uuids = host(*(Device(name) for name in names))
    taken = [share(2), share(1), share(2)]
    assert [uuid for one in taken for uuid in seen(one)] == uuids
    with pytest.raises(SparkConfigError, match="of which 0 are free"):
        share(1)
    taken[1].close()
    assert seen(share(None)) == [uuids[2]]


def test_too_few_are_refused_with_host_numbers_and_who_has_them(host: Any, share: Any) -> None:
    first, second, third = host(Device(H100), Device(H100, (77, 78)), Device("NVIDIA T4"))
    share(1)
    with pytest.raises(SparkConfigError) as refused:
        share(2)
    assert str(refused.value) == (
        f"worker:1 on host {socket.gethostname()} was to have 2 of its GPUs (num_gpus=2), and it "
        "has 3, of which 1 are free:\n"
        f"  {first} ({H100}): claimed by the node of process {os.getpid()}\n"
        f"  {second} ({H100}): processes [77, 78] compute on it\n"
        f"  {third} (NVIDIA T4): free\n"
        "Ask for fewer (num_gpus=0 for none), have fewer nodes on a host, end what computes there, "
        "or have Spark assign GPUs (docs/gpus.md)"
    )
    assert seen(share(1)) == [third], "what was free is free again"


def test_a_host_without_gpus_is_refused_by_name(host: Any, share: Any) -> None:
    host()
    with pytest.raises(SparkConfigError, match=r"it has 0, of which 0 are free: none at all\."):
        share(1)


def test_gpus_that_others_compute_on_are_refused_and_used_memory_comes_last(
    host: Any, share: Any
) -> None:
    gib = 1 << 30
    uuids = host(
        Device(H100, used_nbytes=40 * gib),
        Device(H100, (5,)),
        Device(H100, used_nbytes=gib // 2),
        Device(H100),
    )
    assert seen(share(3)) == [uuids[2], uuids[3], uuids[0]]


def test_instances_of_a_split_gpu_are_claimed_one_by_one(host: Any, share: Any) -> None:
    parts = tuple(Device("1g", uuid=f"MIG-{new_uuid()}") for _ in range(2))
    host(Device("NVIDIA A100", instances=parts))
    assert [seen(share(1)), seen(share(1))] == [[part.uuid] for part in parts]


@pytest.mark.parametrize(
    ("visible", "allowed"),
    [
        (None, "abcd"),
        ((), ""),
        (("2", "0"), "ca"),
        (("GPU-b", "1"), "b"),
        (("GPU-",), "ab"),
        (("1", "9", "0"), "b"),  # CUDA ends at the first that is not there
        (("GPU-x",), ""),
        (("2",), "c"),
        (("3",), "d"),
        (("MIG-d",), "d"),
    ],
)
def test_the_hosts_own_setting_says_which_may_be_claimed(
    visible: tuple[str, ...] | None, allowed: str
) -> None:
    all_of_them = [
        gpus.Gpu("GPU-a", H100, index=0),
        gpus.Gpu("GPU-b", H100, index=1),
        gpus.Gpu("MIG-c", H100, index=2),
        gpus.Gpu("MIG-d", H100, index=3),
    ]
    assert [gpu.uuid[-1] for gpu in gpus.allowed_gpus(all_of_them, visible)] == list(allowed)


def test_only_what_the_host_allows_is_claimed(host: Any, share: Any) -> None:
    uuids = host(*(Device(H100) for _ in range(4)))
    environ = {"CUDA_VISIBLE_DEVICES": f"3,{uuids[1]}"}
    assert seen(share(2, environ=environ)) == [uuids[3], uuids[1]]
    with pytest.raises(SparkConfigError, match=f"DEVICES=3,{uuids[1]} limits it"):
        share(1, environ=environ)


def test_a_node_waits_for_gpus_that_are_about_to_be_free(
    host: Any, share: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (uuid,) = host(Device(H100))
    before, polls = share(1), []

    def poll(low: float, high: float) -> float:
        polls.append(low)
        if len(polls) == 2:
            before.close()
        return 0.05

    monkeypatch.setattr("random.uniform", poll)
    after = gpus.share_gpus(1, None, "worker:0", NOTHING, wait_s=60)
    assert (seen(after), len(polls)) == ([uuid], 2)
    after.close()


def test_nodes_that_start_at_once_never_share_and_never_all_go_without(host: Any) -> None:
    """Eight want two of seven: three get them, whoever comes first."""
    uuids = host(*(Device(H100) for _ in range(7)))
    start = threading.Barrier(8)

    def take(number: int) -> gpus.GpuShare | str:
        start.wait(SOON_S)
        try:
            return gpus.share_gpus(2, None, f"worker:{number}", NOTHING, wait_s=1)
        except SparkConfigError as error:
            return str(error)

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(take, range(8)))
    shares = [one for one in results if isinstance(one, gpus.GpuShare)]
    taken = [uuid for one in shares for uuid in seen(one)]
    for one in shares:
        one.close()
    assert (len(shares), len(set(taken)), set(taken) <= set(uuids)) == (3, 6, True)
    assert sum("it has 7, of which " in one for one in results if isinstance(one, str)) == 5


def test_a_claim_is_the_whole_hosts_and_ends_with_its_process() -> None:
    uuid = new_uuid()
    command = [sys.executable, "-c", HOLDER, uuid]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    assert gpus.claimant_of(uuid) is None
    with subprocess.Popen(command, **pipes) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "claimed\n"
        assert gpus.claimant_of(uuid) == first.pid
        assert gpus.claim_gpu(uuid) is None
        assert subprocess.run(command, input="", capture_output=True, text=True).stdout == (
            "refused\n"
        )
        first.kill()
        first.wait()
        claim = gpus.claim_gpu(uuid)
        assert claim is not None
        with claim:
            assert gpus.claimant_of(uuid) == os.getpid()


def test_many_that_ask_who_has_a_gpu_get_an_answer() -> None:
    """Nobody accepts their connections, of which the kernel keeps a number."""
    uuid = new_uuid()
    claim = gpus.claim_gpu(uuid)
    assert claim is not None
    with claim:
        answers = {gpus.claimant_of(uuid) for _ in range(5000)}
    assert answers <= {os.getpid(), 0}
    assert gpus.claimant_of(uuid) is None


# by default


def test_by_default_a_node_gets_one_where_there_are_any(host: Any, share: Any) -> None:
    first, second = host(Device(H100), Device(H100))
    assert [seen(share(None)), seen(share(None))] == [[first], [second]]
    with pytest.raises(SparkConfigError, match=r"1 of its GPUs \(the default without Spark's"):
        share(None)


def test_by_default_nothing_changes_where_there_are_none(
    monkeypatch: pytest.MonkeyPatch, host: Any, share: Any
) -> None:
    host(Device(H100))
    for visible in ("", "-1"):
        assert share(None, environ={"CUDA_VISIBLE_DEVICES": visible}) == gpus.GpuShare()
    monkeypatch.setattr(gpus, "has_driver", lambda: False)
    assert share(None) == gpus.GpuShare()


def test_without_the_package_a_node_says_that_it_sees_all_or_that_it_cannot(
    host: Any, share: Any
) -> None:
    host(Device(H100), has_package=False)
    told = share(None)
    assert told.environment == {}
    assert "sees all of its host's" in told.note
    assert "pip install nvidia-ml-py" in told.note
    with pytest.raises(FrameworkMissingError) as refused:
        share(1)
    text = str(refused.value)
    assert text.startswith(
        f"worker:1 on host {socket.gethostname()} was to have 1 of its GPUs (num"
    )
    assert "pip install nvidia-ml-py" in text
    assert text.endswith("Ask for fewer (num_gpus=0 for none)")


def test_host_without_a_driver_is_told_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch, host: Any, share: Any
) -> None:
    host(Device(H100), has_package=False)
    monkeypatch.setattr(gpus, "has_driver", lambda: False)
    with pytest.raises(SparkConfigError) as refused:
        share(1)
    assert str(refused.value).partition("(num_gpus=1), ")[2].splitlines()[0] == (
        "and this host has no NVIDIA driver: set num_gpus=0, or run the nodes on hosts with GPUs"
    )


def test_in_a_pod_a_node_claims_only_what_is_asked_for(host: Any, share: Any) -> None:
    """Claims do not reach other pods, whose GPUs an image may show all the same."""
    (uuid,) = host(Device(H100))
    pod = {"SPARK_EXECUTOR_POD_IP": "10.1.2.3"}
    told = share(None, environ=pod)
    assert told.environment == {"CUDA_VISIBLE_DEVICES": ""}
    assert "Spark assigned none to this pod's task" in told.note
    assert seen(share(1, environ=pod)) == [uuid]


def test_a_gpu_is_what_the_driver_says_of_it() -> None:
    devices = [
        Device("NVIDIA H100 80GB HBM3", (7, 8), uuid="GPU-a", used_nbytes=5),
        Device("Tesla", uuid="GPU-b"),
    ]
    assert gpus.list_gpus(Nvml(*devices)) == [
        gpus.Gpu("GPU-a", "NVIDIA H100 80GB HBM3", (7, 8), 0, 5),
        gpus.Gpu("GPU-b", "Tesla", (), 1, 0),
    ]


def test_instances_of_a_split_gpu_stand_for_it_and_have_its_number() -> None:
    parts = (Device("1g", (9,), uuid="MIG-a"), None, Device("1g", uuid="MIG-b"))
    found = gpus.list_gpus(Nvml(Device("T4"), Device("NVIDIA A100", instances=parts)))
    assert [(gpu.uuid, gpu.index, gpu.pids) for gpu in found[1:]] == [
        ("MIG-a", 1, (9,)),
        ("MIG-b", 1, ()),
    ]


def test_a_gpu_that_a_container_hides_is_left_out_and_the_others_keep_their_numbers() -> None:
    found = gpus.list_gpus(Nvml(Device("T4", is_ours=False), Device("T4", uuid="GPU-b")))
    assert [(gpu.uuid, gpu.index) for gpu in found] == [("GPU-b", 1)]


@pytest.mark.parametrize("name", ["GRID", "NVIDIA GB10", "NVIDIA GeForce RTX 3090"])
def test_a_gpu_that_does_not_tell_all_is_one_all_the_same(name: str) -> None:
    """No processes of a virtual one, no memory of one that shares the CPU's, no instances."""
    assert gpus.list_gpus(Nvml(Device(name, uuid="GPU-a"))) == [gpus.Gpu("GPU-a", name)]


def test_nvml_is_closed_whatever_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", module)
    with pytest.raises(KeyError), gpus.open_nvml() as opened:
        assert (opened, module.opened) == (module, 1)
        raise KeyError
    assert module.opened == 0


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Nvml(starts=False))
    with pytest.raises(FrameworkMissingError, match="does not answer: Driver Not Loaded"):
        gpus.open_nvml().__enter__()
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(FrameworkMissingError, match="pip install nvidia-ml-py on the executors"):
        gpus.open_nvml().__enter__()


@pytest.mark.parametrize("is_there", [True, False])
def test_a_driver_is_known_by_its_device(tmp_path: Path, is_there: bool) -> None:
    device = tmp_path / "nvidiactl"
    if is_there:
        device.touch()
    assert gpus.has_driver([str(device)]) == is_there
