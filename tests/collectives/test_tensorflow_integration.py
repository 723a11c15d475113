"""Two nodes that exchange arrays by TensorFlow's own collectives, compared with numpy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest

from sparkdl.core.errors import ConfigError, NodeFailedError
from sparkdl.core.options import Feeding
from sparkdl.node.context import NodeContext
from tests.doubles.nodes import launch

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(200)]

SIZE = 2
DTYPES = ("float32", "float64", "float16", "int8", "int16", "int32", "int64", "uint8", "bool")
_SOON_S = 150.0
_TIMEOUT_S = 5.0


def array(rank: int, dtype: str = "float64", rows: int = 4) -> Any:
    """Return a member's array: small whole numbers, so that all sums are exact."""
    values = np.random.default_rng(rank).integers(0, 4, (rows, 3))
    return values.astype(dtype)


def exchange(group: Any, ctx: NodeContext) -> dict[str, Any]:
    from ml_dtypes import bfloat16

    from sparkdl.collectives.group import Op

    mine = array(ctx.rank)
    found: dict[str, Any] = {op.value: group.all_reduce([mine + 1], op)[0] for op in Op}
    found["dtypes"] = group.all_reduce([array(ctx.rank, dtype) for dtype in DTYPES], Op.SUM)
    found["scalar"], found["none"] = group.all_reduce([np.float32(ctx.rank), mine[:0]], Op.SUM)
    (found["only none"],) = group.all_reduce([mine[:0]], Op.SUM)
    found["whole"] = group.all_reduce([array(ctx.rank, "int64") - 2])[0]
    found["rows"] = group.all_gather(array(ctx.rank, "float32", rows=ctx.rank))
    found["no rows"] = group.all_gather(mine[:0])
    found["words"] = group.all_gather(np.array([2**31 + ctx.rank], np.uint32)).tolist()
    found["narrow"] = group.all_gather(mine[:1, 0].astype(bfloat16)).astype(np.float32)
    found["from 1"] = group.broadcast(np.asfortranarray(mine), 1)
    found["sent"], found["got"] = group.all_to_all(mine, [1, 3])
    found["even"] = group.all_to_all(mine[:2])[0]
    found["shares"] = [group.reduce_scatter(mine, op) for op in Op]
    found["objects"] = group.all_gather_object({"rank": ctx.rank, "much": "x" * ctx.rank})
    same = group.subgroup([1, 0])
    assert same is not None
    found["same"] = (same.ranks, same.all_reduce([mine], Op.SUM)[0])
    wrongs: tuple[Any, ...] = (
        lambda: group.all_reduce([np.zeros(3, complex)]),
        lambda: group.all_gather(np.array([object()])),
        lambda: group.all_to_all(np.zeros(3), [1, 1]),
        lambda: group.broadcast(np.zeros(3), SIZE),
        lambda: group.join(),
    )
    for wrong in wrongs:
        with pytest.raises(ConfigError):
            wrong()
    return found


def exchange_and_lose_one(folder: Path, ctx: NodeContext) -> None:
    """Write down what was exchanged; then wait for the first member, which does not come."""
    from sparkdl.collectives.group import connect

    place = (ctx.rank, SIZE, ctx.all_gather, ctx.member.host, _TIMEOUT_S)
    group = connect(*place, transport="tensorflow")
    found = exchange(group, ctx)
    (folder / f"{ctx.rank}").write_bytes(cloudpickle.dumps(found))
    group.barrier()
    if ctx.rank:
        group.barrier()
    ctx.barrier()


@pytest.mark.deep  # test_group_integration.py has it by gloo
def test_members_have_what_numpy_computes_and_waiting_for_one_ends_in_time(tmp_path: Path) -> None:
    """TensorFlow 2.21 itself sometimes aborts where it gives a collective up."""
    arrays = [array(rank) for rank in range(SIZE)]
    stack = np.stack(arrays)
    options: dict[str, Any] = {"framework": "tensorflow", "feeding": Feeding(fed=False)}
    with (
        pytest.raises(NodeFailedError, match=r"all_reduce failed: .*timed out|SIGABRT"),
        launch(exchange_and_lose_one, tmp_path, SIZE, **options) as cluster,
    ):
        cluster.results(_SOON_S)
    results = [cloudpickle.loads((tmp_path / f"{rank}").read_bytes()) for rank in range(SIZE)]
    shares = [slice(0, 2), slice(2, 4)]
    hows: dict[str, Callable[..., Any]] = {
        "average": np.mean,
        "sum": np.sum,
        "min": np.min,
        "max": np.max,
        "product": np.prod,
    }
    for rank, found in enumerate(results):
        for (name, how), share in zip(hows.items(), found["shares"], strict=True):
            np.testing.assert_allclose(found[name], how(stack + 1, axis=0))
            np.testing.assert_allclose(share, how(stack, axis=0)[shares[rank]])
        for dtype, total in zip(DTYPES, found["dtypes"], strict=True):
            assert total.dtype == dtype
            np.testing.assert_array_equal(total, stack.sum(0).astype(dtype), dtype)
        assert found["scalar"] == 1.0
        assert found["none"].shape == found["only none"].shape == (0, 3)
        np.testing.assert_array_equal(found["whole"], np.trunc((stack - 2).mean(0)))
        rows = [array(other, "float32", rows=other) for other in range(SIZE)]
        np.testing.assert_array_equal(found["rows"], np.concatenate(rows))
        assert found["no rows"].shape == (0, 3)
        assert found["words"] == [2**31, 2**31 + 1]
        np.testing.assert_array_equal(found["narrow"], stack[:, 0, 0])
        np.testing.assert_array_equal(found["from 1"], arrays[1])
        start, count = ((0, 1), (1, 3))[rank]
        sent = np.concatenate([each[start : start + count] for each in arrays])
        np.testing.assert_array_equal(found["sent"], sent)
        np.testing.assert_array_equal(found["got"], [count] * SIZE)
        np.testing.assert_array_equal(found["even"], stack[:, rank])
        wanted = [{"rank": other, "much": "x" * other} for other in range(SIZE)]
        assert found["objects"] == wanted
        assert found["same"][0] == (0, 1)
        np.testing.assert_array_equal(found["same"][1], stack.sum(0))
