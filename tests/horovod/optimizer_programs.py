"""What three nodes do with `DistributedOptimizer` for PyTorch, and what one does alone."""

from __future__ import annotations

from typing import Any

import pytest

from sparkdl.node.context import NodeContext

SIZE, STEPS, ROWS = 3, 4, 4


def train(args: None, ctx: NodeContext) -> dict[str, Any]:
    import torch

    import sparkdl.horovod.torch as hvd

    torch.set_num_threads(1)
    hvd.init()
    found = {name: compared(hvd, **options) for name, options in cases(hvd).items()}
    found["pieces"] = pieces(hvd)
    found["sparse"] = embeddings(hvd)
    found["normalized"] = normalized(hvd)
    misuse(hvd)
    found["joined"] = joined(hvd, fewest=1)
    found["joined at once"] = joined(hvd, fewest=0)
    return found


def cases(hvd: Any) -> dict[str, dict[str, Any]]:
    """Return options of the optimizer, and with what the loss is to be multiplied."""
    return {
        "average": {},
        "sum": {"op": hvd.Sum, "factor": 1 / SIZE},
        "two passes": {"backward_passes_per_step": 2, "passes": 2},
        "predivided": {"gradient_predivide_factor": 1.5},
        "fp16": {"compression": hvd.Compression.fp16},
        "groups": {"num_groups": 2},
    }


def network(seed: int = 7) -> Any:
    """Return a network of which a layer is used for some batches alone."""
    import torch

    class Network(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.first = torch.nn.Linear(3, 5)
            self.last = torch.nn.Linear(5, 1)
            self.seldom = torch.nn.Linear(5, 5)
            self.never = torch.nn.Linear(5, 5)
            self.frozen = torch.nn.Linear(3, 3)
            self.frozen.requires_grad_(False)

        def forward(self, x: Any, is_seldom: bool) -> Any:
            hidden = self.first(self.frozen(x)).tanh()
            return self.last(self.seldom(hidden) if is_seldom else hidden)

    torch.manual_seed(seed)
    return Network()


def loss_of(model: Any, step: int, part: int) -> Any:
    """Return the loss of one node's batch, of one pass; every third batch uses the layer."""
    import torch

    x = torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(100 * step + part))
    return (model(x, is_seldom=(step + part) % 3 == 0) - x.sum(1, keepdim=True)).square().mean()


def compared(hvd: Any, factor: float = 1.0, passes: int = 1, **options: Any) -> Any:
    """Train with others, and alone on the batches of all; return both models' parameters."""
    import torch

    model = network(seed=hvd.rank())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), **options)
    assert isinstance(optimizer, torch.optim.SGD)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer)
    for step in range(STEPS):
        optimizer.zero_grad()
        for i in range(passes):
            (loss_of(model, step, hvd.rank() + SIZE * i) * factor).backward()
        optimizer.step()
        schedule.step()
    alone = network(seed=0)
    single = torch.optim.SGD(alone.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(single, 2)
    for step in range(STEPS):
        single.zero_grad()
        for part in range(SIZE * passes):
            (loss_of(alone, step, part) / SIZE).backward()
        with_zeros(alone)
        single.step()
        schedule.step()
    return flat(model), flat(alone)


def with_zeros(model: Any) -> None:
    """Give parameters that were not used gradients of zeros, as Horovod does."""
    for param in model.parameters():
        if param.grad is None and param.requires_grad:
            param.grad = param.new_zeros(param.shape)


def pieces(hvd: Any) -> Any:
    """Clip between `synchronize` and `step`, and reduce meanwhile."""
    import torch

    results = []
    for is_alone in (False, True):
        model = network()
        optimizer: Any = torch.optim.Adam(model.parameters(), lr=0.01)
        if not is_alone:
            optimizer = hvd.DistributedOptimizer(optimizer)
        for step in range(STEPS):
            optimizer.zero_grad()
            for part in range(SIZE) if is_alone else [hvd.rank()]:
                (loss_of(model, step, part) / (SIZE if is_alone else 1)).backward()
            with_zeros(model)
            if not is_alone:
                # This rank has started other reductions by now than its peers.
                assert float(hvd.allreduce(torch.tensor(1.0), op=hvd.Sum)) == SIZE
                optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            if is_alone:
                optimizer.step()
            else:
                with optimizer.skip_synchronize():
                    optimizer.step()
        results.append(flat(model))
    return results


def embeddings(hvd: Any) -> Any:
    import torch

    results = []
    for is_alone in (False, True):
        torch.manual_seed(3)
        table = torch.nn.EmbeddingBag(6, 2, sparse=True)
        head = torch.nn.Linear(2, 1)
        params = [*table.parameters(), *head.parameters()]
        optimizers: list[Any] = [
            torch.optim.SparseAdam([*table.parameters()], lr=0.1),
            torch.optim.SGD(head.parameters(), lr=0.1),
        ]
        if not is_alone:
            optimizers = [hvd.DistributedOptimizer(optimizer) for optimizer in optimizers]
        for step in range(STEPS):
            for optimizer in optimizers:
                optimizer.zero_grad()
            for part in range(SIZE) if is_alone else [hvd.rank()]:
                words = torch.tensor([[part, (part + step) % 6, 5]])
                loss = head(table(words)).square().sum()
                (loss / (SIZE if is_alone else 1)).backward()
            for optimizer in optimizers:
                optimizer.step()
        assert is_alone or params[0].grad.is_sparse
        results.append(flat(torch.nn.ModuleList([table, head])))
    return results


def normalized(hvd: Any) -> Any:
    """Normalize batches of different sizes by the statistics of all of them."""
    import torch

    x = torch.randn(6, 4, 5, generator=torch.Generator().manual_seed(1))
    parts = [x[:1], x[1:3], x[3:]]
    results = []
    for is_alone in (False, True):
        torch.manual_seed(5)
        norm = torch.nn.BatchNorm1d(4) if is_alone else hvd.SyncBatchNorm(4)
        batch = (x if is_alone else parts[hvd.rank()]).clone().requires_grad_()
        out = norm(batch)
        weights = torch.arange(out.numel() if is_alone else x.numel(), dtype=torch.float32)
        weights = weights.view(x.shape).split([1, 2, 3])[hvd.rank()] if not is_alone else weights
        (out * weights.reshape(out.shape)).sum().backward()
        grad, result = batch.grad, out.detach()
        if is_alone:
            grad, result = (t.split([1, 2, 3])[hvd.rank()] for t in (grad, result))
        state = [norm.running_mean, norm.running_var, norm.eval()(x[:1]).detach()]
        results.append([t.flatten().tolist() for t in (result, grad, *state)])
    return results


def misuse(hvd: Any) -> None:
    import torch

    from sparkdl.core.errors import ConfigError, RemovedError

    model = network()

    def distributed(**options: Any) -> Any:
        return hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), **options)

    for wrong in (
        {"named_parameters": [("a", p) for p in model.parameters()]},
        {"named_parameters": [*model.first.named_parameters()]},
        {"named_parameters": [*model.parameters()]},
        {"op": hvd.Sum, "gradient_predivide_factor": 2.0},
        {"backward_passes_per_step": 0},
    ):
        with pytest.raises(ConfigError):
            distributed(**wrong)
    with pytest.raises(RemovedError, match=r"hvd\.Adasum: sparkdl does not adapt gradients"):
        distributed(op=hvd.Adasum)
    optimizer = distributed()
    loss_of(model, 0, 0).backward()
    with pytest.raises(AssertionError, match=r"zero_grad\(\) after loss.backward\(\)"):
        optimizer.zero_grad()
    with pytest.raises(AssertionError, match="set backward_passes_per_step"):
        loss_of(model, 0, 0).backward()
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.zero_grad()
    loss_of(model, 0, 0).backward()
    optimizer.synchronize()
    with pytest.warns(UserWarning, match=r"step\(\) called without optimizer.skip_synchronize\(\)"):
        optimizer.step()
    assert len(set(optimizer._parameter_names.values())) == len([*model.parameters()])
    renewed = distributed()
    with pytest.raises(AssertionError, match="another DistributedOptimizer was made"):
        optimizer.step()
    model.frozen.weight.requires_grad_(True)
    loss_of(model, 0, 0).backward()
    with pytest.raises(AssertionError, match="1 parameters have gradients that are not reduced"):
        renewed.step()
    with pytest.raises(ValueError, match="one value per channel over all processes"):
        hvd.SyncBatchNorm(4)(torch.zeros(int(hvd.rank() == 0), 4))
    other = torch.nn.Linear(1, 1 + (hvd.rank() == 1))
    with pytest.raises(ConfigError, match="does not train the same parameters"):
        hvd.DistributedOptimizer(torch.optim.SGD(other.parameters(), lr=0.1))


def joined(hvd: Any, fewest: int) -> Any:
    """Train on `fewest` batches on rank 0, and on one more on each next; ranks 0 and 1 join."""
    import torch

    hvd.shutdown()  # of the optimizers above, some never took a step: these are forgotten
    hvd.init()
    results = []
    for is_alone in (False, True):
        model = network()
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.05)
        if not is_alone:
            optimizer = hvd.DistributedOptimizer(optimizer)
        for step in range(SIZE - 1 + fewest if is_alone else hvd.rank() + fewest):
            optimizer.zero_grad()
            for part in range(step + 1 - fewest, SIZE) if is_alone else [hvd.rank()]:
                (loss_of(model, step, part) / (SIZE if is_alone else 1)).backward()
            optimizer.step()
            if not is_alone:
                hvd.allreduce(torch.tensor(1.0), op=hvd.Sum)
        if not is_alone:
            last = hvd.join()
            hvd.broadcast_parameters(model.state_dict(), root_rank=last)
        results.append(flat(model))
    return [*results, last]


def flat(model: Any) -> list[float]:
    return [float(value) for p in model.parameters() for value in p.detach().flatten()]
