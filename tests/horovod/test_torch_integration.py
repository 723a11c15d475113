"""Horovod's face for PyTorch on three nodes: what it computes is what numpy, or one node, does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sparkdl.core.deadline import Deadline
from sparkdl.core.errors import ConfigError
from sparkdl.core.options import Feeding
from sparkdl.node.context import NodeContext
from tests.doubles.labs import Lab, lab_of
from tests.doubles.nodes import SOON_S
from tests.horovod.optimizer_programs import SIZE, train
from tests.horovod.together import together

pytestmark = [pytest.mark.smoke, pytest.mark.torch]


three = lab_of("torch", SIZE, feeding=Feeding(fed=False))


def array(rank: int, rows: int = 4) -> Any:
    return np.random.default_rng(rank).integers(1, 5, (rows, 2)).astype(np.float32)


def operate(args: None, ctx: NodeContext) -> dict[str, Any]:
    import torch

    import sparkdl.horovod.torch as hvd
    from sparkdl.horovod.common import group_of

    torch.set_num_threads(1)
    hvd.shutdown()
    with pytest.raises(ValueError, match=r"has not been initialized; use hvd.init\(\)"):
        hvd.rank()
    evens = hvd.ProcessSet([2, 0])
    hvd.init(process_sets=[evens])
    hvd.init()
    assert not torch.distributed.is_initialized(), "the default group is the user's"
    place = (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size())
    assert place == (ctx.rank, SIZE, ctx.rank, SIZE)
    assert (hvd.cross_rank(), hvd.cross_size(), hvd.is_homogeneous()) == (0, 1, True)
    assert hvd.is_initialized()
    assert hvd.gloo_enabled()
    assert not hvd.mpi_built()
    assert not hvd.mpi_threads_supported()
    found = reductions(hvd, torch.from_numpy(array(ctx.rank)))
    found |= exchanges(hvd, ctx.rank)
    found |= gradients(hvd, torch.from_numpy(array(ctx.rank)).requires_grad_())
    found |= sets(hvd, evens, torch.from_numpy(array(ctx.rank)))
    found |= states(hvd, ctx.rank)
    refusals(hvd)
    under_way(hvd, ctx)
    found["last"] = joins(hvd)
    found["beside"] = beside(torch.distributed, hvd)
    before = group_of(), distributed(hvd)
    hvd.barrier()
    hvd.shutdown()
    assert not hvd.is_initialized()
    hvd.init()
    found["again"] = float(hvd.allreduce(torch.tensor(float(ctx.rank)), op=hvd.Sum))
    assert hvd.join() in range(SIZE), f"{before} is of the processes before"
    pairs = [hvd.add_process_set(ranks) for ranks in ([0, 1], [1, 2])]
    of_sets = [distributed(hvd, process_set=pair) for pair in pairs if pair.included()]
    with pytest.raises(ConfigError, match="with an optimizer of a process set"):
        hvd.join()
    assert of_sets
    return found


def distributed(hvd: Any, **options: Any) -> Any:
    import torch

    sgd = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 0.1)
    return hvd.DistributedOptimizer(sgd, **options)


def beside(dist: Any, hvd: Any) -> list[float]:
    """Use PyTorch's default process group at the same time."""
    import torch

    dist.init_process_group("gloo")
    mine, theirs = torch.ones(1), torch.ones(1)
    handle = hvd.allreduce_async_(mine, op=hvd.Sum)
    dist.all_reduce(theirs)
    hvd.synchronize(handle)
    dist.destroy_process_group()
    return [float(mine), float(theirs)]


def under_way(hvd: Any, ctx: NodeContext) -> None:
    """Start operations on rank 0 alone, and more of the same names; the others come later."""
    import torch

    def starts() -> list[Any]:
        tensor = torch.ones(3, 2)
        return [
            hvd.allreduce_async(tensor, name="a name", op=hvd.Sum),
            hvd.allgather_async(tensor, name="a name"),
            hvd.broadcast_async(tensor, 0, name="a name"),
            hvd.grouped_reducescatter_async([tensor], name="a name"),
        ]

    handles = starts() if ctx.rank == 0 else []
    if ctx.rank == 0:
        again: tuple[Any, ...] = (
            lambda: hvd.allreduce_async_(torch.ones(3, 2), name="a name"),
            lambda: hvd.allreduce(torch.ones(3, 2), name="a name"),
            lambda: hvd.allgather(torch.ones(3, 2), name="a name"),
            lambda: hvd.broadcast_(torch.ones(3, 2), 0, name="a name"),
        )
        for wrong in again:
            with pytest.raises(ValueError, match="'a name' is under way already"):
                wrong()
    ctx.barrier()
    for handle in handles or starts():
        hvd.synchronize(handle)
    assert float(hvd.allreduce(torch.ones(1), name="a name", op=hvd.Sum)) == SIZE


def joins(hvd: Any) -> int:
    """Join in the order 1, 2, 0; what cannot be done without rank 1 fails for its callers."""
    import torch

    from sparkdl.core.errors import MismatchError

    rank, one = hvd.rank(), torch.ones(1)
    if rank != 1:
        with pytest.raises(MismatchError, match="only sums and averages"):
            hvd.allgather(one)
        with pytest.raises(hvd.HorovodInternalError, match="the members' calls differ"):
            hvd.allreduce(torch.ones(1 + rank))
        assert float(hvd.allreduce(one, op=hvd.Sum)) == SIZE - 1
    if rank == 0:
        assert float(hvd.allreduce(one, op=hvd.Sum)) == 1
    return int(hvd.join())


def reductions(hvd: Any, mine: Any) -> dict[str, Any]:
    import torch

    ops = {"average": hvd.Average, "sum": hvd.Sum, "min": hvd.Min, "max": hvd.Max}
    found = {name: hvd.allreduce(mine, op=op, name=name) for name, op in ops.items()}
    found["old"] = hvd.allreduce(mine, average=False)
    found["product"] = hvd.allreduce(mine, op=hvd.Product)
    found["scaled"] = hvd.allreduce(mine, op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0)
    found["fp16"] = hvd.allreduce(mine, compression=hvd.Compression.fp16, op=hvd.Sum)
    assert found["fp16"].dtype == mine.dtype
    own = mine.clone()
    assert hvd.allreduce_(own, op=hvd.Sum) is own
    found["in place"] = own
    across = mine.t().clone(memory_format=torch.preserve_format)
    assert not across.is_contiguous()
    found["not contiguous"] = hvd.allreduce_(across, op=hvd.Sum)
    found["grouped"] = hvd.grouped_allreduce([mine, mine.int(), mine[:1]], op=hvd.Sum)
    pair = [mine.clone(), mine[0].clone()]
    hvd.grouped_allreduce_(pair, op=hvd.Sum)
    found["grouped in place"] = pair
    first, second = hvd.allreduce_async(mine, op=hvd.Sum), hvd.allgather_async(mine[:1])
    third = hvd.grouped_allreduce_async([mine, mine], op=hvd.Sum)
    own = mine.clone()
    fourth = hvd.allreduce_async_(own, op=hvd.Sum)
    found["later"] = [hvd.synchronize(handle) for handle in (fourth, first)]
    assert found["later"][0] is own
    assert hvd.poll(first)
    assert hvd.poll(second)
    found["later"] += hvd.synchronize(third)
    found["share"] = hvd.reducescatter(mine, op=hvd.Sum)
    found["shares"] = hvd.grouped_reducescatter([mine, mine[:3]], op=hvd.Sum)
    return plain(found)


def exchanges(hvd: Any, rank: int) -> dict[str, Any]:
    import torch

    mine = torch.from_numpy(array(rank))
    found = {
        "rows": hvd.allgather(torch.from_numpy(array(rank, rows=rank))),
        "both": hvd.grouped_allgather([mine, mine[:rank]]),
        "from 1": hvd.broadcast(mine, 1),
        "moved": hvd.alltoall(mine[:3]),
        "split": hvd.alltoall(mine, splits=torch.tensor([0, 1, 3])),
    }
    assert hvd.broadcast_(mine, root_rank=2) is mine
    found["from 2"] = mine
    found["from 0"] = hvd.synchronize(hvd.broadcast_async_(torch.full((2,), float(rank)), 0))
    found["objects"] = hvd.allgather_object({"rank": rank})
    assert hvd.broadcast_object(hvd.Sum if rank == 2 else None, root_rank=2) is hvd.Sum
    return plain(found)


def gradients(hvd: Any, mine: Any) -> dict[str, Any]:
    """Return the gradients of each operation's result, weighted by the rank."""
    import torch

    def gradient(result: Any) -> Any:
        (grad,) = torch.autograd.grad((result * (hvd.rank() + 1)).sum(), mine)
        return grad

    found = {
        "d average": gradient(hvd.allreduce(mine)),
        "d sum": gradient(hvd.allreduce(mine, op=hvd.Sum)),
        "d gather": gradient(hvd.allgather(mine)),
        "d broadcast": gradient(hvd.broadcast(mine, 1)),
        "d alltoall": gradient(hvd.alltoall(mine[:3])),
        "d share": gradient(hvd.reducescatter(mine, op=hvd.Sum)),
        "d share of mean": gradient(hvd.reducescatter(mine, postscale_factor=2.0)),
        "d shares": gradient(hvd.grouped_reducescatter([mine, mine], op=hvd.Sum)[1]),
    }
    with pytest.raises(ValueError, match="no gradient of a reduction"):
        gradient(hvd.allreduce(mine, op=hvd.Max))
    return plain(found)


def sets(hvd: Any, evens: Any, mine: Any) -> dict[str, Any]:
    found = {}
    assert evens.size() == 2
    assert evens.included() == (hvd.rank() != 1)
    assert evens.rank() == {0: 0, 1: -1, 2: 1}[hvd.rank()]
    assert hvd.global_process_set.size() == SIZE
    odds = hvd.add_process_set(np.array([1]))
    assert (odds.size(), odds.process_set_id, evens.process_set_id) == (1, 2, 1)
    with pytest.raises(ValueError, match=r"duplicate process set: .*the set with the id 1 has"):
        hvd.add_process_set(reversed([0, 2]))
    if evens.included():
        found["evens"] = hvd.allreduce(mine, op=hvd.Sum, process_set=evens)
        found["evens' 2"] = hvd.broadcast(mine, 2, process_set=evens)
        with pytest.raises(ValueError, match="is not in this process set"):
            hvd.broadcast(mine, 1, process_set=evens)
    else:
        found["odds"] = hvd.allreduce(mine, op=hvd.Sum, process_set=odds)
        with pytest.raises(ValueError, match="rank 1 is not in"):
            hvd.allreduce(mine, process_set=evens)
    assert hvd.remove_process_set(odds)
    assert (odds.process_set_id, odds.ranks) == (None, [1])
    assert hvd.add_process_set(odds) is odds
    assert hvd.remove_process_set(odds)
    assert not hvd.remove_process_set(hvd.global_process_set)
    with pytest.raises(ValueError, match="is not known"):
        hvd.barrier(odds)
    return plain(found)


def states(hvd: Any, rank: int) -> dict[str, Any]:
    """Give models and optimizers that differ the state of rank 1."""
    import torch

    torch.manual_seed(rank)
    found: dict[str, Any] = {}
    for name, kind in (("adam", torch.optim.Adam), ("lbfgs", torch.optim.LBFGS)):
        model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
        optimizer = kind(model.parameters(), lr=0.1 * (rank + 1))
        if rank == 1:  # the others have no state yet

            def closure(model: Any = model, optimizer: Any = optimizer) -> Any:
                optimizer.zero_grad()
                loss = model(torch.arange(8.0).view(4, 2)).square().sum()
                loss.backward()
                return loss

            optimizer.step(closure)
        hvd.broadcast_parameters(model.state_dict(), root_rank=1)
        hvd.broadcast_optimizer_state(optimizer, root_rank=1)
        found[name] = [*model.state_dict().values()], optimizer.param_groups[0]["lr"]
        tensors = [v for state in optimizer.state.values() for v in state.values()]
        found[f"{name} state"] = [v for v in tensors if isinstance(v, torch.Tensor)]
    hvd.broadcast_parameters(model.named_parameters(), root_rank=0)
    hvd.broadcast_parameters([*model.parameters()], root_rank=0)
    return plain(found)


def refusals(hvd: Any) -> None:
    import torch

    from sparkdl.core.errors import RemovedError

    tensor = torch.zeros(2)
    wrongs: tuple[Any, ...] = (
        lambda: hvd.allreduce(tensor, op="Sum"),
        lambda: hvd.allreduce(tensor, average=True, op=hvd.Sum),
        lambda: hvd.allreduce(tensor.to(torch.complex64)),
        lambda: hvd.allreduce(tensor.to_sparse()),
        lambda: hvd.broadcast(tensor, SIZE),
        lambda: hvd.broadcast_parameters(3),
        lambda: hvd.broadcast_parameters({"a": 3}),
        lambda: hvd.synchronize(3),
        lambda: hvd.reducescatter(tensor[0]),
        lambda: hvd.reducescatter_async(tensor[0]),
        lambda: hvd.grouped_reducescatter([tensor, tensor[0]]),
        lambda: hvd.grouped_reducescatter_async([tensor, tensor[0]]),
        lambda: hvd.alltoall(torch.zeros(3), splits=torch.ones(3)),
        lambda: hvd.ProcessSet("all"),
        lambda: hvd.add_process_set([SIZE]),
    )
    for wrong in wrongs:
        with pytest.raises(ConfigError):
            wrong()
    removals: tuple[Any, ...] = (lambda: hvd.allreduce(tensor, op=hvd.Adasum),)
    for removed in removals:
        with pytest.raises(RemovedError):
            removed()
    with pytest.raises(hvd.HorovodInternalError, match="the members' calls differ"):
        hvd.allreduce(torch.zeros(2 + hvd.rank()))
    several = [torch.zeros(2, 3), torch.zeros(1)] if hvd.rank() else [torch.zeros(3, 2), tensor[:1]]
    with pytest.raises(hvd.HorovodInternalError, match="the members' calls differ"):
        hvd.broadcast_parameters(several)


def plain(found: dict[str, Any]) -> dict[str, Any]:
    return {name: lowered(value) for name, value in found.items()}


def lowered(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [lowered(item) for item in value]
    return value.detach().numpy() if hasattr(value, "detach") else value


def same(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_operations_give_what_numpy_computes(three: Lab) -> None:
    arrays = [array(rank) for rank in range(SIZE)]
    stack = np.stack(arrays)
    total = stack.sum(0)
    results = together(three, operate)
    for rank, found in enumerate(results):
        same(found["average"], stack.mean(0))
        for name in ("sum", "old", "in place", "fp16"):
            same(found[name], total)
        same(found["not contiguous"], total.T)
        same(found["min"], stack.min(0))
        same(found["max"], stack.max(0))
        same(found["product"], stack.prod(0))
        same(found["scaled"], total * 2)
        for one, expected in zip(found["grouped"], (total, total, total[:1]), strict=True):
            same(one, expected)
        same(found["grouped in place"][1], total[0])
        assert len(found["later"]) == 4
        for one in found["later"]:
            same(one, total)
        share = [slice(0, 2), slice(2, 3), slice(3, 4)][rank]
        same(found["share"], total[share])
        same(found["shares"][1], total[rank : rank + 1])
        check_exchanges(found, arrays, rank)
        same(found["d average"], np.full((4, 2), 2))
        same(found["d sum"], np.full((4, 2), 6))
        same(found["d gather"], np.full((4, 2), 2))
        same(found["d broadcast"], np.full((4, 2), 2 * (rank == 1)))
        same(found["d alltoall"], [[1, 1], [2, 2], [3, 3], [0, 0]])
        same(found["d share"], [[3, 3], [3, 3], [6, 6], [9, 9]])
        same(found["d shares"], [[3, 3], [3, 3], [6, 6], [9, 9]])
        same(found["d share of mean"], [[2, 2], [2, 2], [4, 4], [6, 6]])
        assert found["last"] == 0
        if rank == 1:
            same(found["odds"], arrays[1])
        else:
            same(found["evens"], arrays[0] + arrays[2])
            same(found["evens' 2"], arrays[2])
        for kind in ("adam", "lbfgs"):
            values, rate = found[kind]
            assert rate == pytest.approx(0.2)
            assert found[f"{kind} state"]
            for mine, first in zip(
                [*values, *found[f"{kind} state"]],
                [*results[1][kind][0], *results[1][f"{kind} state"]],
                strict=True,
            ):
                np.testing.assert_array_equal(mine, first)
        assert found["beside"] == [SIZE, SIZE]
        assert found["again"] == 3.0


def check_exchanges(found: Any, arrays: Any, rank: int) -> None:
    rows = [array(other, rows=other) for other in range(SIZE)]
    same(found["rows"], np.concatenate(rows))
    same(found["both"][0], np.concatenate(arrays))
    same(found["both"][1], np.concatenate([arrays[other][:other] for other in range(SIZE)]))
    same(found["from 1"], arrays[1])
    same(found["from 2"], arrays[2])
    same(found["from 0"], [0, 0])
    same(found["moved"], [each[rank] for each in arrays])
    start, count = [(0, 0), (0, 1), (1, 3)][rank]
    same(found["split"][0], np.concatenate([each[start : start + count] for each in arrays]))
    same(found["split"][1], [count] * SIZE)
    assert found["objects"] == [{"rank": other} for other in range(SIZE)]


def test_training_equals_one_on_larger_batches(three: Lab) -> None:
    results = together(three, train)
    assert three.cluster._controller.wait_for(
        lambda view: any(active.step > 0 for active in view.activity.values()),
        Deadline.after(SOON_S),
    ), "the driver hears of the steps"
    for rank, found in enumerate(results):
        for name in ("joined", "joined at once"):
            assert found[name].pop() == 2, "the last one to join"
        for name, (trained, alone) in found.items():
            if name == "normalized":
                for mine, expected in zip(trained, alone, strict=True):
                    assert mine == pytest.approx(expected, abs=2e-5), name
                continue
            tolerance = 2e-3 if name == "fp16" else 1e-6
            assert trained == pytest.approx(alone, rel=tolerance, abs=tolerance), (name, rank)
            assert trained == results[0][name][0], f"{name}: the same on all nodes"
