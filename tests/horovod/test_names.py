"""Horovod's names are there, or say what to use instead."""

from __future__ import annotations

from importlib import import_module
from inspect import signature

import pytest

from sparkdl.core.errors import RemovedModuleError

TORCH = (  # of horovod/torch/__init__.py and its __all__, 0.28.1
    *("Compression", "allgather_object", "broadcast_object", "broadcast_optimizer_state"),
    *("broadcast_parameters", "allreduce", "allreduce_async", "allreduce_", "allreduce_async_"),
    *("grouped_allreduce", "grouped_allreduce_async", "grouped_allreduce_"),
    *("grouped_allreduce_async_", "sparse_allreduce_async", "allgather", "allgather_async"),
    *("grouped_allgather", "grouped_allgather_async", "broadcast", "broadcast_async"),
    *("broadcast_", "broadcast_async_", "alltoall", "alltoall_async", "reducescatter"),
    *("reducescatter_async", "grouped_reducescatter", "grouped_reducescatter_async", "join"),
    *("barrier", "poll", "synchronize", "init", "shutdown", "is_initialized", "start_timeline"),
    *("stop_timeline", "size", "local_size", "cross_size", "rank", "local_rank", "cross_rank"),
    *("mpi_threads_supported", "mpi_enabled", "mpi_built", "gloo_enabled", "gloo_built"),
    *("nccl_built", "ddl_built", "ccl_built", "cuda_built", "rocm_built", "ProcessSet"),
    *("global_process_set", "add_process_set", "remove_process_set", "Average", "Sum", "Adasum"),
    *("Max", "Min", "Product", "HorovodInternalError", "DistributedOptimizer", "SyncBatchNorm"),
)


@pytest.mark.torch  # SyncBatchNorm is a class of PyTorch
def test_horovods_names_for_pytorch_are_there_or_say_what_to_use() -> None:
    here = import_module("sparkdl.horovod.torch")
    absent = set()
    for name in TORCH:
        try:
            assert getattr(here, name) is not None, name
        except RemovedModuleError:
            absent.add(name)
    assert absent == {"sparse_allreduce_async", "start_timeline", "stop_timeline"}


@pytest.mark.parametrize("face", ["torch", "tensorflow", "keras", "tensorflow.keras", "common"])
def test_names_that_are_exported_are_there(face: str) -> None:
    module = import_module(f"sparkdl.horovod.{face}")
    for name in set(module.__all__) - {"SyncBatchNorm"}:
        assert getattr(module, name) is not None, name


@pytest.mark.parametrize(
    ("module", "advice"),
    [
        ("_keras.callbacks", r"sparkdl\.horovod\.keras"),
        ("data.data_loader_base", "DataLoader"),
        ("mxnet", "PyTorch or TensorFlow"),
        ("ray", r"sparkdl\.horovod\.spark\.run"),
        ("runner.launch", "sparkdl run -np 2"),
        ("common.util", "own launcher or engine"),
        ("tensorflow.sync_batch_norm", "GroupNormalization"),
        ("spark.driver.host_discovery", r"sparkdl\.horovod\.spark\.run"),
        ("spark.keras.datamodule", "fit_on_parquet"),
        ("spark.lightning.util", "fit_on_parquet"),
        ("spark.tensorflow.compute_worker", r"sparkdl\.parquet"),
        ("tensorflow.data.compute_service", r"cluster\.feed"),
        ("tensorflow.gradient_aggregation", "backward_passes_per_step"),
    ],
)
def test_module_that_is_absent_says_what_to_use(module: str, advice: str) -> None:
    with pytest.raises(RemovedModuleError, match=advice) as raised:
        import_module(f"sparkdl.horovod.{module}")
    assert isinstance(raised.value, ModuleNotFoundError)  # as programs expect that try an import


def test_absent_module_says_so_in_each_form_of_an_import() -> None:
    for statement in (
        "from sparkdl.horovod import ray",
        "from sparkdl.horovod.spark.torch.datamodule import NVTabularDataModule",
        "import sparkdl.horovod.spark.common.cache as cache",
        "from sparkdl.horovod.spark.common.backend import Backend",
        "from sparkdl.horovod.spark.common.store import AbstractFilesystemStore",
        "from sparkdl.horovod.spark.task import gloo_exec_fn, mpirun_exec_fn",
        "from sparkdl.horovod.spark.task.task_service import SparkTaskService",
        "import sparkdl.horovod.spark.task.mpirun_exec_fn",
        "from sparkdl.horovod.torch import start_timeline",
        "from sparkdl.horovod.keras.callbacks import BestModelCheckpoint",
        "from sparkdl.horovod.keras.elastic import UpdateEpochStateCallback",
        "from sparkdl.horovod.tensorflow import PartialDistributedGradientTape",
        "from sparkdl.horovod.tensorflow.keras.callbacks import BestModelCheckpoint",
        "from sparkdl.horovod.tensorflow.mpi_ops import rank_op",
    ):
        with pytest.raises(RemovedModuleError, match=r"docs/horovod\.md"):
            exec(statement, {})


def test_misspelt_name_is_the_usual_error() -> None:
    for statement in (
        "from sparkdl.horovod.spark.runner import run_elastik",
        "from sparkdl.horovod.spark.task import get_devices",
        "from sparkdl.horovod import run_all",
    ):
        with pytest.raises(ImportError, match="cannot import name"):
            exec(statement, {})


def test_operations_are_found_where_horovod_defines_them() -> None:
    for framework, its_own in (
        ("torch", {"allreduce_async_", "synchronize", "poll", "Compression", "join"}),
        ("tensorflow", {"allgather", "broadcast"}),
    ):
        module = import_module(f"sparkdl.horovod.{framework}.mpi_ops")
        face = import_module(f"sparkdl.horovod.{framework}")
        both = {"init", "rank", "size", "Average", "Adasum", "ProcessSet"}
        assert its_own | both <= set(vars(module)) | set(module.__all__)
        assert all(getattr(module, name) is not None for name in module.__all__)
        assert all(getattr(module, name) is getattr(face, name) for name in ("init", "Average"))
        with pytest.raises(AttributeError, match="no attribute 'allreduces'"):
            _ = module.allreduces


@pytest.mark.parametrize(
    ("module", "name", "order"),
    [
        ("keras", "allreduce", "value name"),
        ("keras", "broadcast", "tensor root_rank name"),
        ("keras", "load_model", "filepath custom_optimizers custom_objects compression"),
        ("tensorflow.keras", "DistributedOptimizer", "optimizer name"),
        ("torch", "broadcast_optimizer_state", "optimizer root_rank model"),
        ("runner", "run", "func args kwargs num_proc"),
    ],
)
def test_arguments_have_horovods_names_and_order(module: str, name: str, order: str) -> None:
    function = getattr(import_module(f"sparkdl.horovod.{module}"), name)
    wanted = order.split()
    assert [*signature(function).parameters][: len(wanted)] == wanted
