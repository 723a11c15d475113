"""The table of `docs/migrating.md`: every name in it is there, and what it refuses is refused."""

from __future__ import annotations

import inspect
import re
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import pytest

import sparkdl
from sparkdl.core import settings
from sparkdl.core.errors import RemovedError
from sparkdl.core.roles import WORKER
from sparkdl.core.spec import ClusterSpec, NodeSpec
from sparkdl.core.world import Address, build_world
from sparkdl.node import hadoop
from sparkdl.node.context import NodeContext
from sparkdl.node.link import AgentLink
from sparkdl.tfos import TFCluster, util

PAGE = (Path(__file__).parents[2] / "docs" / "migrating.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| (`[^|]+`) \| (\w+) \|", PAGE, re.MULTILINE)
NAMES = [(name.strip("`"), now) for name, now in ROWS if re.fullmatch(r"`[\w.]+\.\w+`", name)]

TFOS_2 = """
TFCluster: InputMode TFCluster run
TFNode: DataFeed batch_results export_saved_model hdfs_path next_batch release_port
  start_cluster_server terminate
TFSparkNode: TFNodeContext
TFParallel: run
TFManager: TFManager connect start
marker: EndPartition Marker
compat: disable_auto_shard export_saved_model is_gpu_available
gpu_info: AS_LIST AS_STRING get_gpus is_gpu_available
util: find_in_path get_ip_address read_executor_id single_node_env write_executor_id
reservation: Client Reservations Server
dfutil: fromTFExample infer_schema isLoadedDF loadTFRecords saveAsTFRecords toTFExample
"""
"""Public names of TensorFlowOnSpark 2.2.5, but for `pipeline`."""


def context() -> NodeContext:
    node = NodeSpec(0, WORKER, 0)
    world = build_world(0, {node: Address("a", 1, "")})
    spec = ClusterSpec("c", (node,), framework="plain")
    nothing: Any = None
    return NodeContext(world, world.member(0), spec, cast(AgentLink, nothing), nothing)


def find(name: str) -> Any:
    first, *rest = name.split(".")
    found: Any = context() if first == "ctx" else import_module(f"sparkdl.tfos.{first}")
    for part in rest:
        found = getattr(found, part)
    return found


@pytest.mark.parametrize(("name", "now"), NAMES)
def test_name_of_the_table_is_there(name: str, now: str) -> None:
    assert now in ("same", "better", "refused")
    found = find(name)
    if now == "refused":
        wanted = [p for p in inspect.signature(found).parameters.values() if p.default is p.empty]
        plain = [None for p in wanted if p.kind is p.POSITIONAL_OR_KEYWORD]
        with pytest.raises(RemovedError):
            found(*plain)


def test_table_has_every_public_name() -> None:
    wanted = set()
    for line in re.sub(r"\n  ", " ", TFOS_2.strip()).splitlines():
        module, _, names = line.partition(": ")
        wanted |= {f"{module}.{name}" for name in names.split()}
    in_table = {name for name, _ in NAMES}
    assert wanted - in_table - {"TFManager.TFManager"} == set()


def test_table_has_every_argument_of_run() -> None:
    listed = {name for text, _ in ROWS for name in re.findall(r"`(\w+)`", text)}
    positional = [
        p.name
        for p in inspect.signature(TFCluster.run).parameters.values()
        if p.kind is p.POSITIONAL_OR_KEYWORD
    ]
    assert set(positional) - {"sc"} <= listed


@pytest.mark.parametrize(
    "name", [n for text, _ in ROWS for n in re.findall(r"`([A-Z]+_[A-Z_]+)`", text)]
)
def test_variable_of_the_table_is_read_or_does_not_matter(name: str) -> None:
    source = "".join(inspect.getsource(module) for module in (settings, util, hadoop))
    does_not_matter = ("SPARK_REUSE_WORKER",)
    assert (f'"{name}"' in source) == (name not in does_not_matter)


def test_surface_has_the_version_that_it_has_the_names_of() -> None:
    assert sparkdl.tfos.__version__ == "2.2.5"
    assert sparkdl.TFNode is import_module("sparkdl.tfos.TFNode")
    assert sparkdl.TFParallel is import_module("sparkdl.tfos.TFParallel")
