"""PyTorch: a model in shards (FSDP2) that goes on after a failure, on any number of nodes; digits.

    python examples/pytorch/sharded.py --fail-at 40

Runs on this machine, without Spark: pass a SparkSession to `launch`, and leave `executor` out, to
run it on a cluster. Every node writes its own shards into the checkpoint
(`torch.distributed.checkpoint`). Start it again with another `--nodes`: it goes on where it was.

Data: the 1,797 images of scikit-learn's `load_digits`. Prints `FSDP2: accuracy`, above 0.9. Takes
about 20 seconds on two cores.
"""

from __future__ import annotations

import argparse

import sparkdl

STEPS, BATCH, EVERY = 120, 48, 20


def train(args: argparse.Namespace, ctx: sparkdl.NodeContext) -> float:
    """Train this node's rows of each batch; runs once in every node, and again after a failure."""
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from sklearn.datasets import load_digits
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images / 16).float(), torch.tensor(labels)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.ReLU(), torch.nn.Linear(96, 10))
    for part in (model[0], model[2], model):
        fully_shard(part)  # each node keeps its rows of each weight
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)

    def state() -> dict[str, object]:
        return dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True))

    last, first = ctx.last_checkpoint, 0
    if last:
        saved, first = state(), last.step
        dcp.load(saved, checkpoint_id=last.folder)  # into the shards of this number of nodes
        parts = {f"{name}_state_dict": part for name, part in saved.items()}
        set_state_dict(model, optimizer, **parts)
    if ctx.is_chief:
        print(f"{ctx.num_workers} nodes go on at step {first}")
    for step in range(first, STEPS):
        order = torch.Generator().manual_seed(step)  # the same batch, whatever the nodes
        rows = torch.randint(len(x), (BATCH,), generator=order)[ctx.rank :: ctx.num_workers]
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
        ctx.report(step)
        if step == args.fail_at and not ctx.restarts:
            raise RuntimeError(f"fails at step {step}")
        if (step + 1) % EVERY == 0:
            with ctx.checkpoint(step + 1) as folder:
                dcp.save(state(), checkpoint_id=folder)
    return float((model(x).argmax(1) == y).float().mean())


def main() -> None:
    """Train on nodes of this machine."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--fail-at", type=int, default=-1, help="step; -1 for never")
    parser.add_argument("--checkpoints", default="out/sharded", help="folder that all nodes reach")
    args = parser.parse_args()
    accuracy = sparkdl.run(
        None,
        train,
        args,
        args.nodes,
        framework="torch",
        executor="local",
        checkpoint_dir=args.checkpoints,
        max_restarts=1,
        observe=sparkdl.Observe(log_to_driver=True),
    )[0]
    print(f"FSDP2: accuracy {accuracy:.2f}")


if __name__ == "__main__":
    main()
