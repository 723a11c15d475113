"""Three nodes that exchange what the plays of `test_agreement_integration.py` do not have."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sparkdl.core.options import Feeding
from sparkdl.node.context import NodeContext
from tests.doubles.nodes import launch

pytestmark = pytest.mark.torch

SIZE = 3
DTYPES = ("float32", "float64", "float16", "int8", "int16", "int32", "int64", "uint8", "bool")
_SOON_S = 120.0


def array(rank: int, dtype: str = "float64", rows: int = 4) -> Any:
    """Return a member's array: small whole numbers, so that all sums are exact."""
    values = np.random.default_rng(rank).integers(0, 4, (rows, 3))
    return values.astype(dtype)


def tensor(given: Any) -> Any:
    import torch

    return torch.from_numpy(np.array(given))


def exchange(args: None, ctx: NodeContext) -> dict[str, Any]:
    import torch

    from sparkdl.collectives.connect import connect
    from sparkdl.collectives.transport import Op, Reduction

    torch.set_num_threads(1)
    group: Any = connect(ctx.rank, SIZE, ctx.all_gather, ctx.member.host, 60.0)
    assert (group.rank, group.size, group.ranks) == (ctx.rank, SIZE, (0, 1, 2))
    mine, total = array(ctx.rank), Reduction(Op.SUM)
    found: dict[str, Any] = {
        "dtypes": [group.all_reduce_(tensor(array(ctx.rank, d)), total) for d in DTYPES]
    }
    found["whole"] = group.all_reduce_(tensor((array(ctx.rank, "int64") - 2) * 2**60 // 49))
    scaled = Reduction(Op.SUM, 0.5, 4.0)
    found["scaled much"] = group.all_reduce_(tensor(mine).repeat(900, 1), scaled)
    found["words"] = group.all_gather(tensor(np.array([ctx.rank], np.uint32)))[0].tolist()
    found["large objects"] = [
        len(each) for each in group.all_gather_object("x" * 10**ctx.rank * 500)
    ]
    assert group.broadcast_object(Op.MAX if ctx.rank == 1 else None, 1) is Op.MAX
    assert group.broadcast_object("x" * 50_000 if ctx.rank == 1 else None, 1) == "x" * 50_000
    found |= narrow(group)
    refused(group)
    group.barrier()
    found |= lost(group, ctx)
    return {name: lowered(value) for name, value in found.items()}


def lowered(value: Any) -> Any:
    if isinstance(value, list):
        return [lowered(item) for item in value]
    return value.numpy() if hasattr(value, "detach") else value


def narrow(group: Any) -> dict[str, Any]:
    import torch

    mine = tensor(array(group.rank)).to(torch.bfloat16)
    total = group.all_reduce_(mine.clone())
    whole, _ = group.all_gather(mine[:, 0])
    rows, got = group.all_to_all(mine[:3, 0])
    assert {each.dtype for each in (total, whole, rows)} == {torch.bfloat16}
    return {"narrow": [total.float(), whole.float(), rows.float(), got]}


def refused(group: Any) -> None:
    """Ask for what cannot be; the group works afterwards."""
    import torch

    from sparkdl.collectives.transport import Op, Reduction
    from sparkdl.core.errors import ConfigError, MismatchError

    wrongs: tuple[Any, ...] = (
        lambda: group.all_to_all(torch.zeros(3), [1, 1, 0]),
        lambda: group.all_to_all(torch.zeros(4)),
        lambda: group.broadcast_(torch.zeros(3), SIZE),
        lambda: group.subgroup([0, 0]),
        lambda: group.subgroup([SIZE]),
    )
    for wrong in wrongs:
        with pytest.raises(ConfigError):
            wrong()
    for reduce in (group.all_reduce_, group.reduce_scatter):
        with pytest.raises(MismatchError, match=r"rank 2: .*sum, x 2, x 1"):
            reduce(torch.zeros(3), Reduction(Op.SUM, float(group.rank)))
    group.barrier()


def lost(group: Any, ctx: NodeContext) -> dict[str, Any]:
    """Wait for a member that does not come, and for one that has gone."""
    from sparkdl.collectives.connect import connect
    from sparkdl.core.errors import CollectiveError

    hasty = connect(ctx.rank, SIZE, ctx.all_gather, ctx.member.host, 1.0)
    said = []
    if ctx.rank:
        with pytest.raises(CollectiveError) as info:
            hasty.barrier()
        said.append(str(info.value))
    ctx.barrier()
    if ctx.rank == 2:
        group.close()
    with pytest.raises(CollectiveError) as info:
        group.barrier()
    hasty.close()
    return {"lost": [*said, str(info.value)]}


def test_members_have_what_numpy_computes_and_end_when_one_is_lost() -> None:
    arrays = [array(rank) for rank in range(SIZE)]
    stack = np.stack(arrays)
    options: dict[str, Any] = {"framework": "torch", "feeding": Feeding(fed=False)}
    with launch(exchange, nodes=SIZE, **options) as cluster:
        results = cluster.results(_SOON_S)
    for rank, found in enumerate(results):
        for dtype, total in zip(DTYPES, found["dtypes"], strict=True):
            assert total.dtype == dtype
            expected = stack.any(0) if dtype == "bool" else stack.sum(0)
            np.testing.assert_array_equal(total, expected, err_msg=dtype)
        wide = ((stack.astype("int64") - 2) * 2**60 // 49).sum(0)
        np.testing.assert_array_equal(found["whole"], np.sign(wide) * (np.abs(wide) // SIZE))
        np.testing.assert_array_equal(found["scaled much"], np.tile(stack.sum(0) * 2, (900, 1)))
        assert found["words"] == [0, 1, 2]
        assert found["large objects"] == [500, 5000, 50_000]
        total, whole, exchanged, got = found["narrow"]
        np.testing.assert_allclose(total, stack.mean(0), rtol=2**-7)
        np.testing.assert_array_equal(whole, stack[:, :, 0].reshape(-1))
        np.testing.assert_array_equal(exchanged, stack[:, rank, 0])
        assert got == [1] * SIZE
        if rank:
            assert "not all called this within 1 s" in found["lost"][0]
        assert "barrier" in found["lost"][-1]
