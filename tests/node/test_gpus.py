"""Which GPUs a node gets: Spark's, or claimed ones that no other node has; never too few."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from sparkdl.core.errors import FrameworkMissingError, SparkConfigError
from sparkdl.node import gpus
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
            taken = gpus.share_gpus(wanted, None, "worker:1", environ=environ)
            stack.callback(taken.close)
            return taken

        yield take


def seen(share: gpus.GpuShare) -> list[str]:
    return share.environment["CUDA_VISIBLE_DEVICES"].split(",")


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
        share = gpus.share_gpus(wanted, assigned, "worker:0", environ=environ)
        order = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        assert share == gpus.GpuShare({"CUDA_VISIBLE_DEVICES": seen, **order})


def test_gpu_of_spark_that_the_executor_does_not_see_is_refused_or_stays_hidden() -> None:
    with pytest.raises(SparkConfigError, match=r"Spark assigned GPU 1, and .* sees 1 GPUs"):
        gpus.share_gpus(None, ("1",), "worker:0", environ={"CUDA_VISIBLE_DEVICES": "4"})
    hidden = {"CUDA_VISIBLE_DEVICES": "-1,2"}
    assert seen(gpus.share_gpus(None, ("1",), "worker:0", environ=hidden)) == [""]
    with pytest.raises(SparkConfigError, match="CUDA_VISIBLE_DEVICES of its executor shows 0"):
        gpus.share_gpus(1, ("1",), "worker:0", environ=hidden)


def test_more_than_spark_assigned_is_refused_with_the_setting_to_change() -> None:
    with pytest.raises(SparkConfigError) as refused:
        gpus.share_gpus(3, ("1", "5"), "worker:0")
    assert str(refused.value).startswith(
        f"worker:0 on host {socket.gethostname()} needs 3 of its GPUs (num_gpus=3): Spark assigned "
        "1, 5 to its task, "
    )
    assert "raise spark.task.resource.gpu.amount" in str(refused.value)


def test_no_gpu_is_seen_where_none_is_wanted(host: Any) -> None:
    host(Device(H100))
    for assigned in (None, (), ("0", "1")):
        assert gpus.share_gpus(0, assigned, "ps:0") == gpus.GpuShare({"CUDA_VISIBLE_DEVICES": ""})


@pytest.mark.parametrize(
    ("assigned", "nodes", "parts"),
    [("0123", 2, [("0", "1"), ("2", "3")]), ("012", 2, [("0",), ("1",)]), ("01", 1, [("0", "1")]),
     ("0", 2, [(), ()]), ("", 2, [(), ()]), ("01", 0, [])],
)  # fmt: skip
def test_nodes_inside_one_task_share_no_gpu(
    assigned: str, nodes: int, parts: list[tuple[str, ...]]
) -> None:
    assert gpus.split_gpus(tuple(assigned), nodes) == parts


def test_too_few_are_refused_with_found_and_free(host: Any, share: Any) -> None:
    _, _, third = host(Device(H100), Device(H100, (77, 78)), Device("NVIDIA T4"))
    share(1)
    with pytest.raises(SparkConfigError) as refused:
        share(2)
    assert str(refused.value) == (
        f"worker:1 on host {socket.gethostname()} needs 2 of its GPUs (num_gpus=2): 3 found, 1 "
        "free. Ask for fewer (num_gpus=0 for none), have fewer nodes on a host, end what computes "
        "there, or have Spark assign GPUs (docs/deployment.md#gpus)"
    )
    assert seen(share(1)) == [third], "what was free is free again"


@pytest.mark.parametrize(
    ("visible", "allowed"),
    [
        (None, "abcd"),
        ((), ""),
        (("2", "0"), "ca"),
        (("GPU-b", "1"), "b"),
        (("GPU-",), "abcd"),
        (("1", "9", "0"), "b"),  # CUDA ends at the first that is not there
        (("GPU-x",), ""),
        (("2",), "c"),
        (("3",), "d"),
        (("MIG-d", "MIG-e"), "de"),  # claimed by its name
    ],
)
def test_hosts_own_setting_limits_the_claims(visible: tuple[str, ...] | None, allowed: str) -> None:
    all_of_them = [gpus.Gpu(f"GPU-{name}", H100, index=i) for i, name in enumerate("abcd")]
    assert [gpu.uuid[-1] for gpu in gpus.allowed_gpus(all_of_them, visible)] == list(allowed)


def test_only_what_the_host_allows_is_claimed(host: Any, share: Any) -> None:
    uuids = host(*(Device(H100) for _ in range(4)))
    environ = {"CUDA_VISIBLE_DEVICES": f"3,{uuids[1]}"}
    assert seen(share(2, environ=environ)) == [uuids[3], uuids[1]]
    with pytest.raises(
        SparkConfigError, match=rf"2 found \(CUDA_VISIBLE_DEVICES=3,{uuids[1]}\), 0 free"
    ):
        share(1, environ=environ)


def test_a_claim_is_the_whole_hosts_and_ends_with_its_process() -> None:
    uuid = new_uuid()
    command = [sys.executable, "-c", HOLDER, uuid]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    assert not gpus.is_claimed(uuid)
    with subprocess.Popen(command, **pipes) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "claimed\n"
        assert gpus.is_claimed(uuid)
        assert gpus.claim_gpu(uuid) is None
        told = subprocess.run(command, input="", capture_output=True, text=True).stdout
        assert told == "refused\n"
        first.kill()
        first.wait()
        claim = gpus.claim_gpu(uuid)
        assert claim is not None
        claim.close()


def test_by_default_nothing_changes_where_there_are_none(
    monkeypatch: pytest.MonkeyPatch, host: Any, share: Any
) -> None:
    host(Device(H100))
    for visible in ("", "-1"):
        assert share(None, environ={"CUDA_VISIBLE_DEVICES": visible}) == gpus.GpuShare()
    monkeypatch.setattr(gpus, "has_driver", lambda: False)
    assert share(None) == gpus.GpuShare()


def test_without_the_package_a_node_says_whether_it_sees_all(host: Any, share: Any) -> None:
    host(Device(H100), has_package=False)
    told = share(None)
    assert told.environment == {}
    assert "sees all of its host's" in told.note
    assert "pip install nvidia-ml-py" in told.note
    with pytest.raises(FrameworkMissingError) as refused:
        share(1)
    text = str(refused.value)
    assert text.startswith(
        f"worker:1 on host {socket.gethostname()} needs 1 of its GPUs (num_gpus=1): "
    )
    assert "pip install nvidia-ml-py" in text
    assert text.endswith("Ask for fewer (num_gpus=0 for none)")


def test_driverless_host_is_named(monkeypatch: pytest.MonkeyPatch, host: Any, share: Any) -> None:
    host(Device(H100), has_package=False)
    monkeypatch.setattr(gpus, "has_driver", lambda: False)
    with pytest.raises(SparkConfigError, match=r"the host has no NVIDIA driver\. Ask for"):
        share(1)


def test_in_a_pod_a_node_claims_only_what_is_asked_for(host: Any, share: Any) -> None:
    """Claims do not reach other pods, whose GPUs an image may show all the same."""
    (uuid,) = host(Device(H100))
    pod = {"SPARK_EXECUTOR_POD_IP": "10.1.2.3"}
    told = share(None, environ=pod)
    assert told.environment == {"CUDA_VISIBLE_DEVICES": ""}
    assert "Spark assigned none to this pod's task" in told.note
    assert seen(share(1, environ=pod)) == [uuid]


def test_a_gpu_that_a_container_hides_is_left_out_and_the_others_keep_their_numbers() -> None:
    found = gpus.list_gpus(Nvml(Device("T4", is_ours=False), Device("T4", uuid="GPU-b")))
    assert [(gpu.uuid, gpu.index) for gpu in found] == [("GPU-b", 1)]
