"""Connect TensorFlow with its cluster: `TF_CONFIG`, and a Keras that can use it."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

from sparkdl.core.files import scratch_of_child
from sparkdl.core.patch import Function, Patch
from sparkdl.core.spec import CHIEF, EVALUATOR, ClusterSpec
from sparkdl.core.world import Member, World
from sparkdl.frameworks.framework import Framework, imported

_PEER_LOST = ("AbortedError", "DeadlineExceededError", "UnavailableError")


class TensorFlow(Framework):
    """TensorFlow 2, with Keras 3 or with tf_keras (`TF_USE_LEGACY_KERAS=1`)."""

    name: ClassVar[str] = "tensorflow"
    distributions: ClassVar[tuple[str, ...]] = ("tensorflow",)
    shares_port: ClassVar[bool] = True
    has_servers: ClassVar[bool] = True

    def import_modules(self) -> None:
        imported("tensorflow", "TensorFlow", "tensorflow (or tensorflow-cpu)")

    def gpus(self) -> list[str]:
        import tensorflow as tf

        found = tf.config.list_physical_devices("GPU")
        details = [tf.config.experimental.get_device_details(gpu) for gpu in found]
        return [str(each.get("device_name", "GPU")) for each in details]

    def environment(self, world: World, member: Member, spec: ClusterSpec) -> dict[str, str]:
        """Return `TF_CONFIG`; nothing for a node that is alone.

        TensorFlow reads it when a strategy or a cluster resolver is made, so setting it after
        the import is early enough. The evaluator stands in its own `TF_CONFIG` only: it trains
        nothing, so the others must not wait for it, but a `MultiWorkerMirroredStrategy` made
        there looks itself up.
        """
        if world.size == 1:
            return {}
        chiefs = {m.role.name for m in world.members if m.role.is_chief}
        cluster = {
            # TensorFlow knows this name alone; users may call the role `master`.
            CHIEF.name if role in chiefs else role: addresses
            for role, addresses in world.cluster_spec().items()
            if role != EVALUATOR.name or member.role.name == role
        }
        job = CHIEF.name if member.role.is_chief else member.role.name
        task = {"type": job, "index": member.index}
        return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": task})}

    def before_map_fun(self, world: World, member: Member) -> None:
        """Make strategies and Keras 3 work with feeds and several workers."""
        if folder := scratch_of_child():
            keep_generated_code(folder)
        if member.role.is_trainer and len(world.trainers) > 1:
            from sparkdl.datasets.tensorflow import let_strategies_keep_batches

            let_strategies_keep_batches()  # before anyone looks up a strategy's method
            _PATIENT.apply()
        if not member.role.is_trainer:
            return
        is_keras_3 = _uses_keras_3()
        from sparkdl.datasets.keras_epochs import patch_fit_for_feeds

        patch_fit_for_feeds()
        if len(world.trainers) > 1:
            from sparkdl.frameworks.keras import apply_shim, refuse_adapting

            refuse_adapting("keras" if is_keras_3 else "tf_keras")
            if is_keras_3:
                apply_shim()

    def serve(self) -> None:
        import tensorflow as tf

        resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
        spec, job, task = resolver.cluster_spec(), resolver.task_type, resolver.task_id
        tf.distribute.Server(spec, job, task, protocol="grpc").join()

    def is_port_lost(self, error: BaseException) -> bool:
        """Whether TensorFlow's server could not listen on its port: a `tf.errors.UnknownError`."""
        return _is_of_tensorflow(error) and "Could not start gRPC server" in str(error)

    def is_peer_lost(self, error: BaseException) -> bool:
        """Whether TensorFlow could not reach another node, or has missed its heartbeats."""
        is_lost = _is_of_tensorflow(error) and type(error).__name__ in _PEER_LOST
        return is_lost or super().is_peer_lost(error)


def _patiently(stock: Function, *args: Any, **given: Any) -> None:
    # JAX's own: TensorFlow gives up a node of a busy host after 10 s. sparkdl sees losses itself.
    stock(*args, **{"heartbeat_timeout_in_ms": 100_000, **given})


_CONFIGURE = "tensorflow.python.eager.context:Context.configure_coordination_service"
_PATIENT = Patch(_CONFIGURE, ("self", "service_type"), _patiently)


@dataclass(frozen=True)
class InStrategy:
    train_fn: Callable[..., Any]

    def __call__(self, **kwargs: Any) -> Any:
        import tensorflow as tf

        with tf.distribute.MultiWorkerMirroredStrategy().scope():
            return self.train_fn(**kwargs)


def keep_generated_code(folder: Path) -> None:
    """Have AutoGraph write its modules into `folder`: a child that is killed does not delete them.

    https://github.com/tensorflow/tensorflow/blob/v2.21.0/tensorflow/python/autograph/pyct/loader.py
    """
    with suppress(ImportError):
        loader: Any = import_module("tensorflow.python.autograph.pyct.loader")
        make = partial(tempfile.NamedTemporaryFile, dir=folder)
        loader.tempfile = SimpleNamespace(NamedTemporaryFile=make)


def _is_of_tensorflow(error: BaseException) -> bool:
    return type(error).__module__.partition(".")[0] == "tensorflow"


def _uses_keras_3() -> bool:
    """Whether `tf.keras` is Keras 3; asks as TensorFlow does. Imports it, or tf_keras."""
    if os.environ.get("TF_USE_LEGACY_KERAS") in ("true", "True", "1"):
        with suppress(ImportError):
            import_module("tf_keras")
        return False
    try:
        version: str = import_module("keras").__version__
    except ImportError:
        return False
    return version.startswith("3.")
