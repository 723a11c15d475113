"""A program as Horovod's users write them; nothing in it knows of sparkdl."""

import argparse

import horovod
import horovod.torch as hvd
import torch
import torch.nn.functional as F  # noqa: N812 (as everybody does)
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--num-proc", type=int)
parser.add_argument("--use-adasum", action="store_true")
parser.add_argument("--hosts")


def metric_average(value: float, name: str) -> float:
    return float(hvd.allreduce(torch.tensor(value), name=name).item())


def train(args: argparse.Namespace) -> dict[str, list[float]]:
    hvd.init()
    torch.manual_seed(42)
    torch.set_num_threads(1)
    x = torch.randn(96, 4)
    data = TensorDataset(x, (x.sum(1) > 0).long())
    sampler = DistributedSampler(data, num_replicas=hvd.size(), rank=hvd.rank())
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    model = torch.nn.Linear(4, 2)
    lr_scaler = hvd.size() if not args.use_adasum else 1
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * lr_scaler, momentum=0.5)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16,
        op=hvd.Adasum if args.use_adasum else hvd.Average,
        gradient_predivide_factor=1.0,
    )
    scaler = torch.amp.GradScaler("cpu")
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for batch, target in loader:
            optimizer.zero_grad()
            scaler.scale(F.cross_entropy(model(batch), target)).backward()
            optimizer.synchronize()
            scaler.unscale_(optimizer)
            with optimizer.skip_synchronize():
                scaler.step(optimizer)
            scaler.update()
    right = (model(x).argmax(1) == data.tensors[1]).float().mean().item()
    accuracy = metric_average(right, "avg_accuracy")
    if hvd.rank() == 0:
        print(f"accuracy {accuracy:.2f} on {hvd.size()}")
    return {k: v.tolist() for k, v in model.state_dict().items()}


if __name__ == "__main__":
    args = parser.parse_args()
    if args.num_proc:
        models = horovod.run(
            train,
            args=(args,),
            np=args.num_proc,
            hosts=args.hosts,
            use_gloo=True,
            use_mpi=False,
            verbose=2,
        )
        print("models are the same:", models[0] == models[1])
    else:
        train(args)
