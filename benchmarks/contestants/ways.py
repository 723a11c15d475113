"""The network of `cnn.py` trained by one way, on nodes of a local cluster.

Every node computes in one thread, so that nodes share the cores of a machine fairly. A step uses
`--batch` rows in all, whatever the number of nodes: the same rows, in the same order.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any

import cnn
from harness import claim_stdout, write

Trained = tuple[float, list[Any]]
"""Seconds of the steps after the first ones; the weights in the end."""


def multi_worker_mirrored(args: argparse.Namespace, ctx: Any) -> Trained:
    """Keras 3 on TensorFlow under a strategy."""
    import keras
    import tensorflow as tf

    _one_thread(tf)
    with tf.distribute.MultiWorkerMirroredStrategy().scope():
        model = cnn.keras_model(keras)
        _compile(keras, model, _sgd(keras))
    return _fit(tf, keras, model, args, ctx, args.batch)


def horovod_keras(args: argparse.Namespace, ctx: Any) -> Trained:
    """Keras 3 on TensorFlow with Horovod's optimizer."""
    import keras
    import tensorflow as tf

    import sparkdl.horovod.keras as hvd

    _one_thread(tf)
    hvd.init()
    model = cnn.keras_model(keras)
    _compile(keras, model, hvd.DistributedOptimizer(_sgd(keras)))
    return _fit(tf, keras, model, args, ctx, args.batch // hvd.size())


def _one_thread(tf: Any) -> None:
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)  # a collective waits in one


def _sgd(keras: Any) -> Any:
    return keras.optimizers.SGD(cnn.LEARNING_RATE)


def _compile(keras: Any, model: Any, optimizer: Any) -> None:
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))


def _fit(tf: Any, keras: Any, model: Any, args: Any, ctx: Any, batch: int) -> Trained:
    """Fit; a strategy cuts batches of `batch` rows into one for each replica."""
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    rows = cnn.parts(args.batch, args.steps, ctx.rank, ctx.num_workers)
    dataset = tf.data.Dataset.from_tensor_slices(rows).batch(batch).repeat()
    dataset = dataset.with_options(options)
    clock = cnn.Clock(args.warm_up)
    ticks = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: clock.step())
    model.fit(dataset, steps_per_epoch=args.steps, verbose=0, callbacks=[ticks])
    return clock.seconds, model.get_weights()


def distributed_data_parallel(args: argparse.Namespace, ctx: Any) -> Trained:
    """PyTorch's DDP."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    model = cnn.torch_model()
    trained = _loop(args, ctx, DistributedDataParallel(model), None)
    values = [parameter.detach().numpy() for parameter in model.parameters()]
    return trained, cnn.from_torch(values)


def fully_sharded(args: argparse.Namespace, ctx: Any) -> Trained:
    """PyTorch's FSDP2: each node keeps a share of the parameters."""
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    mesh = dist.init_device_mesh("cpu", (ctx.num_workers,))
    model = cnn.torch_model()
    for layer in model:
        if isinstance(layer, torch.nn.Conv2d | torch.nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    trained = _loop(args, ctx, model, None)
    values = [parameter.detach().full_tensor().numpy() for parameter in model.parameters()]
    return trained, cnn.from_torch(values)


def horovod_torch(args: argparse.Namespace, ctx: Any) -> Trained:
    """PyTorch with Horovod's optimizer."""
    import torch

    import sparkdl.horovod.torch as hvd

    hvd.init()
    model = cnn.torch_model()
    optimizer = torch.optim.SGD(model.parameters(), cnn.LEARNING_RATE)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    trained = _loop(args, ctx, model, optimizer)
    values = [parameter.detach().numpy() for parameter in model.parameters()]
    return trained, cnn.from_torch(values)


def _loop(args: argparse.Namespace, ctx: Any, model: Any, optimizer: Any) -> float:
    import torch

    torch.set_num_threads(1)
    optimizer = optimizer or torch.optim.SGD(model.parameters(), cnn.LEARNING_RATE)
    x, y = cnn.parts(args.batch, args.steps, ctx.rank, ctx.num_workers)
    clock = cnn.Clock(args.warm_up)
    for images, labels in cnn.batches(x.transpose(0, 3, 1, 2), y, args.batch // ctx.num_workers):
        optimizer.zero_grad()
        logits = model(torch.from_numpy(images))
        torch.nn.functional.cross_entropy(logits, torch.from_numpy(labels)).backward()
        optimizer.step()
        clock.step()
    return clock.seconds


def lightning(args: argparse.Namespace, ctx: Any) -> Trained:
    """Lightning's Trainer with DDP."""
    import torch
    from lightning.pytorch import LightningModule, Trainer
    from torch.utils.data import DataLoader, TensorDataset

    from sparkdl.lightning import Environment

    torch.set_num_threads(1)
    x, y = cnn.parts(args.batch, args.steps, ctx.rank, ctx.num_workers)
    images = torch.from_numpy(x.transpose(0, 3, 1, 2).copy())
    rows = TensorDataset(images, torch.from_numpy(y))
    clock = cnn.Clock(args.warm_up)

    class Module(LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = cnn.torch_model()

        def training_step(self, batch: Any, number: int) -> Any:
            return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), cnn.LEARNING_RATE)

        def on_train_batch_end(self, *_: Any) -> None:
            clock.step()

    module = Module()
    trainer = Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=1,
        num_nodes=ctx.num_workers,
        plugins=[Environment()],
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    trainer.fit(module, DataLoader(rows, args.batch // ctx.num_workers))
    values = [parameter.detach().numpy() for parameter in module.net.parameters()]
    return clock.seconds, cnn.from_torch(values)


def jax_data_parallel(args: argparse.Namespace, ctx: Any) -> Trained:
    """JAX: parameters on all devices, rows over them, one jitted step."""
    import jax
    import numpy as np
    from jax import lax
    from jax import numpy as jnp
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as Spec

    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    whole, split = NamedSharding(mesh, Spec()), NamedSharding(mesh, Spec("data"))
    params = [jax.make_array_from_process_local_data(whole, w) for w in cnn.weights()]

    def loss(params: Any, x: Any, y: Any) -> Any:
        for kernel, bias in ((params[0], params[1]), (params[2], params[3])):
            dims = ("NHWC", "HWIO", "NHWC")
            x = jax.nn.relu(
                lax.conv_general_dilated(x, kernel, (1, 1), "VALID", dimension_numbers=dims) + bias
            )
        logits = x.reshape(x.shape[0], -1) @ params[4] + params[5]
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), y[:, None], 1)
        return -jnp.mean(chosen)

    @jax.jit
    def step(params: Any, x: Any, y: Any) -> Any:
        gradients = jax.grad(loss)(params, x, y)
        return jax.tree.map(lambda p, g: p - cnn.LEARNING_RATE * g, params, gradients)

    x, y = cnn.parts(args.batch, args.steps, ctx.rank, ctx.num_workers)
    clock = cnn.Clock(args.warm_up)
    for rows in cnn.batches(x, y.astype(np.int32), args.batch // ctx.num_workers):
        params = step(
            params, *(jax.make_array_from_process_local_data(split, part) for part in rows)
        )
        jax.block_until_ready(params)
        clock.step()
    return clock.seconds, [np.asarray(value.addressable_data(0)) for value in params]


def keras_on_jax(args: argparse.Namespace, ctx: Any) -> Trained:
    """Keras 3 on JAX with its own data parallelism."""
    import keras
    import numpy as np

    keras.distribution.set_distribution(keras.distribution.DataParallel(auto_shard_dataset=False))
    keras.utils.set_random_seed(0)  # Keras wants the same weights on all nodes from the first
    model = cnn.keras_model(keras)
    _compile(keras, model, _sgd(keras))
    x, y = cnn.parts(args.batch, args.steps, ctx.rank, ctx.num_workers)
    clock = cnn.Clock(args.warm_up)
    ticks = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: clock.step())
    rows = cnn.batches(x, y.astype(np.int32), args.batch // ctx.num_workers)
    model.fit(rows, steps_per_epoch=args.steps, verbose=0, callbacks=[ticks])
    values = [variable.value.addressable_data(0) for variable in model.trainable_variables]
    return clock.seconds, [np.asarray(value) for value in values]


Way = tuple[str, Callable[[argparse.Namespace, Any], Trained]]
WAYS: dict[str, Way] = {
    "mirrored": ("tensorflow", multi_worker_mirrored),
    "hvd-keras": ("tensorflow", horovod_keras),
    "ddp": ("torch", distributed_data_parallel),
    "fsdp": ("torch", fully_sharded),
    "hvd-torch": ("torch", horovod_torch),
    "lightning": ("torch", lightning),
    "jax": ("jax", jax_data_parallel),
    "keras-jax": ("jax", keras_on_jax),
}


def train(args: argparse.Namespace, ctx: Any) -> dict[str, Any]:
    """Be the user's function."""
    seconds, made = WAYS[args.way][1](args, ctx)
    return {"seconds": seconds, "weights": made if ctx.rank == 0 else []}


def in_nodes(args: argparse.Namespace) -> Trained:
    """Launch the nodes; return the slowest one's time."""
    import sparkdl

    framework = WAYS[args.way][0]
    found = sparkdl.run(
        None, train, args, args.nodes, framework=framework, executor="local", timeout_s=500
    )
    return max(one["seconds"] for one in found), found[0]["weights"]


def main() -> None:
    """Train, and write a line with the slowest node's time and the loss."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--way", choices=[*WAYS], required=True)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--batch", type=int, default=256, help="rows in a step, of all nodes")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--warm-up", type=int, default=20, help="steps that are not timed")
    parsed = parser.parse_args()
    lines = claim_stdout()
    # Before any framework is imported: nodes share the cores fairly.
    os.environ.update({"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"})
    os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
    seconds, made = in_nodes(parsed)
    rows = parsed.batch * (parsed.steps - parsed.warm_up)
    loss = cnn.loss([value.astype("float64") for value in made])
    write(lines, {"event": "trained", "seconds": seconds, "rows": rows, "loss": loss})


if __name__ == "__main__":
    main()
