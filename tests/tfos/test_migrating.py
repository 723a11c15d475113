"""The table of `docs/migrating.md`: every name in it is there, and what it refuses is refused."""

from __future__ import annotations

import ast
import inspect
import re
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import pytest

from sparkdl.core import settings
from sparkdl.core.errors import RemovedError
from sparkdl.core.spec import WORKER, ClusterSpec, NodeSpec
from sparkdl.core.world import Address, build_world
from sparkdl.node import resources
from sparkdl.node.context import NodeContext
from sparkdl.node.link import AgentLink
from sparkdl.tfos import TFCluster, util
from tests.doubles.programs import output_of

PAGE = (Path(__file__).parents[2] / "docs" / "migrating.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| (`[^|]+`) \| (\w+) \|", PAGE, re.MULTILINE)
NAMES = [(name, now) for text, now in ROWS for name in re.findall(r"`(\w+(?:\.\w+)+)`", text)]

"""Public names of TensorFlowOnSpark 2.2.5, except those that no program for it calls."""

CALLS = """
TFCluster.run(sc, map_fun, tf_args, num_executors, num_ps, tensorboard=False, input_mode=0,
  log_dir=None, driver_ps_nodes=False, master_node=None, reservation_timeout=600,
  queues=['input', 'output', 'error'], eval_node=False, release_port=True)
TFCluster.TFCluster.train(self, dataRDD, num_epochs=0, feed_timeout=600, qname='input')
TFCluster.TFCluster.inference(self, dataRDD, feed_timeout=600, qname='input')
TFCluster.TFCluster.shutdown(self, ssc=None, grace_secs=0, timeout=259200)
TFCluster.TFCluster.tensorboard_url(self)
TFNode.hdfs_path(ctx, path)
TFNode.release_port(ctx)
TFNode.start_cluster_server(ctx, num_gpus=1, rdma=False)
TFNode.export_saved_model(sess, export_dir, tag_set, signatures)
TFNode.DataFeed(mgr, train_mode=True, qname_in='input', qname_out='output', input_mapping=None)
TFNode.DataFeed.next_batch(self, batch_size)
TFNode.DataFeed.should_stop(self)
TFNode.DataFeed.batch_results(self, results)
TFNode.DataFeed.terminate(self)
TFSparkNode.TFNodeContext(executor_id=0, job_name='', task_index=0, cluster_spec={},
  defaultFS='file://', working_dir='.', mgr=None, tmp_socket=None)
ctx.absolute_path(path)
ctx.get_data_feed(train_mode=True, qname_in='input', qname_out='output', input_mapping=None)
ctx.release_port()
ctx.start_cluster_server(num_gpus=1, rdma=False)
ctx.export_saved_model(sess, export_dir, tag_set, signatures)
TFParallel.run(sc, map_fn, tf_args, num_executors, use_barrier=True)
TFManager.start(authkey, queues, mode='local')
TFManager.connect(address, authkey)
marker.Marker()
marker.EndPartition()
compat.export_saved_model(model, export_dir, is_chief=False)
compat.disable_auto_shard(options)
compat.is_gpu_available()
gpu_info.is_gpu_available()
gpu_info.get_gpus(num_gpu=1, worker_index=-1, format='string')
util.single_node_env(num_gpus=1, worker_index=-1, nodes=[])
util.get_ip_address()
dfutil.saveAsTFRecords(df, output_dir)
dfutil.loadTFRecords(sc, input_dir, binary_features=[])
dfutil.infer_schema(example, binary_features=[])
dfutil.fromTFExample(iter, binary_features=[])
dfutil.isLoadedDF(df)
pipeline.Namespace(d)
pipeline.TFEstimator(train_fn, tf_args, export_fn=None)
pipeline.TFModel(tf_args)
pipeline.TFParams.merge_args_params(self)
pipeline.TFTypeConverters.toDict(value)
reservation.Reservations(required)
reservation.Reservations.add(self, meta)
reservation.Reservations.done(self)
reservation.Reservations.get(self)
reservation.Reservations.remaining(self)
reservation.Server(count)
reservation.Server.start(self)
reservation.Server.await_reservations(self, sc, status={}, timeout=600)
reservation.Server.stop(self)
reservation.Client(server_addr)
reservation.Client.register(self, reservation)
reservation.Client.get_reservations(self)
reservation.Client.await_reservations(self)
reservation.Client.request_stop(self)
reservation.Client.close(self)
"""
"""How they are called there: names, order and defaults of the arguments."""


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


def given(value: Any) -> Any:
    """Return a default; None stands for an empty collection, which none should be."""
    if value in ([], {}, ()):
        return None
    return list(value) if isinstance(value, tuple) else value


@pytest.mark.parametrize("call", re.sub(r"\n  ", " ", CALLS.strip()).splitlines())
def test_arguments_have_their_old_names_order_and_defaults(call: str) -> None:
    name, _, arguments = call.partition("(")
    there = ast.parse(f"def call({arguments}: ...").body[0]
    assert isinstance(there, ast.FunctionDef)
    names = [argument.arg for argument in there.args.args]
    defaults = [given(ast.literal_eval(default)) for default in there.args.defaults]
    here = list(inspect.signature(find(name)).parameters.values())
    assert [p.name for p in here[: len(names)]] == names
    assert all(p.kind is p.POSITIONAL_OR_KEYWORD for p in here[: len(names)])
    assert [given(p.default) for p in here[len(names) - len(defaults) : len(names)]] == defaults
    more = [p for p in here[len(names) :] if p.kind is not p.VAR_KEYWORD]
    assert all(p.default is not p.empty for p in more), "a call of then must go on working"


@pytest.mark.parametrize(("name", "now"), NAMES)
def test_name_of_the_table_is_there(name: str, now: str) -> None:
    assert now in ("same", "better", "refused")
    found = find(name)
    if now == "refused":
        wanted = [p for p in inspect.signature(found).parameters.values() if p.default is p.empty]
        plain = [None for p in wanted if p.kind is p.POSITIONAL_OR_KEYWORD]
        with pytest.raises(RemovedError):
            found(*plain)


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
    source = "".join(inspect.getsource(module) for module in (settings, util, resources))
    does_not_matter = ("SPARK_REUSE_WORKER",)
    assert (f'"{name}"' in source) == (name not in does_not_matter)


def test_command_of_the_page_makes_imports_ours(tmp_path: Path) -> None:
    program = tmp_path / "my_program.py"
    program.write_text(
        "from tensorflowonspark import TFNode, compat\n"
        "def main(args, ctx):\n    from tensorflowonspark.pipeline import TFEstimator\n"
        "import horovod.spark\n"
    )
    commands = re.search(r"^sed (-Ei) '(.*?)' my_program.py$", PAGE, re.S | re.M)
    assert commands is not None
    for _ in range(2):  # the second time it changes nothing
        output_of("sed", *commands.groups(), program)
    assert program.read_text() == (
        "from sparkdl.tfos import TFNode, compat\n"
        "def main(args, ctx):\n    from sparkdl.tfos.pipeline import TFEstimator\n"
        "import sparkdl.horovod.spark\n"
    )
