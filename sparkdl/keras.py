"""Checkpoints of Keras trainings. See docs/recovery.md.

Runs in: child
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sparkdl.node.context import NodeContext


def Checkpoint(  # noqa: N802 (what Keras calls a callback)
    ctx: NodeContext, every_steps: int | None = None, every_epochs: int | None = None
) -> Any:
    """Return a callback for `fit`: it makes checkpoints, and continues from the last one.

    Call it on all nodes that train, with a cluster that has a `checkpoint_dir`:

        checkpoint = sparkdl.keras.Checkpoint(ctx, every_steps=100)
        model.fit(ctx.dataset(64, x="image", y="label"), epochs=5, callbacks=[checkpoint],
                  initial_epoch=checkpoint.initial_epoch)

    As `fit` begins, model and optimizer become those of `ctx.last_checkpoint`, if there is one.
    With data of `ctx.dataset` an interrupted epoch continues with the rows that the model has
    not seen; its batches may be mapped, but must not be batched again before `fit`.
    Works in Keras 3 with TensorFlow, PyTorch or JAX; under a strategy of several workers the first
    node writes, and without one each node writes its own model. A step only copies both in memory,
    as `ctx.checkpoint_async` says; the end of `fit` waits for the last write, and raises its error.

    Args:
        every_steps: how many batches to train on between two checkpoints. It cannot be used if
            epochs have a number of steps: with arrays, or `steps_per_epoch`.
        every_epochs: how many epochs; 1 if neither is given.

    Returns:
        A callback with `initial_epoch`, which must be passed to `fit`.

    Raises:
        ConfigError: if an argument is invalid, or Keras is tf_keras; in `fit`, if it begins at
            another epoch.
        CheckpointError: if the checkpoint was made by other means, or in `fit` of another model.
    """
    from sparkdl.frameworks.keras_checkpoint import callback_for

    return callback_for(ctx, every_steps, every_epochs)
