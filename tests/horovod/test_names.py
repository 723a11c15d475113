"""docs/horovod.md says which of Horovod's names are there: it tells the truth."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "horovod.md"
VERDICTS = ("same", "better", "refused")

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


def rows() -> Iterator[tuple[str, str, str]]:
    """Yield module, name and verdict of each row of the tables."""
    text = PAGE.read_text(encoding="utf-8")
    for section in re.split(r"^###? ", text, flags=re.MULTILINE)[1:]:
        heading = re.match(r"`(sparkdl\.horovod[\w.]*)`", section)
        for names, verdict in re.findall(r"^\| (`[^|]+`) \| (\w+) \|", section, re.MULTILINE):
            assert heading, f"{names}: the heading of its table is no module"
            for name in re.findall(r"`(\w+)`", names):
                yield heading[1], name, verdict


def _needs_framework(module: str, name: str) -> str:
    """Return the framework whose class it is, or nothing."""
    if name.startswith("SyncBatchNorm"):
        return "torch" if "torch" in module else "tensorflow"
    return "keras" if name.endswith(("Callback", "Checkpoint")) else ""


ROWS = list(rows())


@pytest.mark.parametrize("module", sorted({module for module, _, _ in ROWS}))
def test_names_are_there_as_the_tables_say(module: str) -> None:
    here = import_module(module)
    for _, name, verdict in (row for row in ROWS if row[0] == module):
        assert verdict in VERDICTS, name
        if verdict == "refused":
            continue  # absent, or an error at use, which other tests meet
        if _needs_framework(module, name) and find_spec(_needs_framework(module, name)) is None:
            continue
        assert getattr(here, name, None) is not None, f"{module}.{name} is {verdict}, they say"


@pytest.mark.parametrize("module", sorted({module for module, _, _ in ROWS}))
def test_tables_leave_no_name_out(module: str) -> None:
    told = {name for where, name, _ in ROWS if where == module}
    public = set(getattr(import_module(module), "__all__", told)) - {"elastic", "callbacks"}
    missing = public - told
    if module == "sparkdl.horovod.common":  # what all of its faces have in common
        missing -= {name for _, name, _ in ROWS} | {"group_of", "op_of"}
    assert not missing, f"{module}: docs/horovod.md has no row for {sorted(missing)}"


def test_all_of_horovods_names_for_pytorch_are_told() -> None:
    told = {name for module, name, _ in ROWS if module == "sparkdl.horovod.torch"}
    assert set(TORCH) <= told
