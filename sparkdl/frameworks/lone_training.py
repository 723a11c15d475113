"""Notices nodes that train unrelated models on shares of the same rows, without any exchange.

Runs in: child, driver

A child knows two things of itself: whether an optimizer has taken a step, and whether anything
connects the process with other nodes. It reports to the driver when the first is so and the second
is not, after its first epoch; `fit` of Keras asks the driver before it begins. One such node may be
meant (a chief that alone trains), several on one feed are a mistake unless the launch says
`Roles(independent_models=True)`.

Everything here looks at libraries that the program has imported, and imports none. If an installed
version lacks the inspected attributes, nothing is reported.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from types import MappingProxyType
from typing import Any

from sparkdl.core.errors import ConfigError
from sparkdl.core.exchange import has_exchanged, note_exchange
from sparkdl.core.patch import Function, Patch
from sparkdl.feed.reader.watch import TrainingWatch

_log = logging.getLogger(__name__)

OPTION = "launch(…, roles=Roles(independent_models=True))"
_STRATEGY = (
    "strategy = tf.distribute.MultiWorkerMirroredStrategy(), and `with strategy.scope():` around "
    "the code that builds and compiles the model"
)
_DDP = (
    "torch.distributed.init_process_group() at the start of map_fun, and "
    "model = torch.nn.parallel.DistributedDataParallel(model) before the optimizer is made"
)
_ADVICE: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "tensorflow": (
            "tensorflow",
            f"{_STRATEGY}; a loop of your own takes its steps with strategy.run",
        ),
        "torch": ("torch", _DDP),
        "lightning": (
            "torch",
            "Trainer(num_nodes=ctx.num_workers, devices=1, "
            "plugins=[sparkdl.lightning.Environment()])",
        ),
        "jax": (
            "jax",
            "mesh = ctx.mesh(data=-1), and ctx.jax_batches(…, sharding=NamedSharding(mesh, "
            "PartitionSpec('data'))): jax.jit then computes gradients over the rows of all nodes",
        ),
        "keras on torch": (
            "torch",
            f"a loop of your own, since fit exchanges nothing with this backend: {_DDP}",
        ),
        "keras on jax": (
            "jax",
            "keras.distribution.set_distribution(keras.distribution.DataParallel("
            "auto_shard_dataset=False)) before the model is made, and fit(ctx.jax_batches(…)"
            ".as_keras())",
        ),
    }
)
"""By what trains: the framework of the launch that it needs, and the code to write."""


def advice(library: str, framework: str) -> str:
    """Return advice on how nodes train one model.

    Args:
        library: the training library, as `LoneTraining` reports it.
        framework: of the launch.
    """
    needed, code = _ADVICE.get(library, _ADVICE["torch"])
    setting = "" if framework == needed else f"launch(…, framework={needed!r}), "
    # JAX has no optimizers of its own, so a node reports when JAX computes gradients.
    untrained = "the gradients are not used to train, " if library == "jax" else ""
    return (
        f"For one model write {setting}{code}. If independent models are meant, {untrained}or the "
        f"nodes exchange by means that sparkdl does not know: {OPTION}"
    )


# Connections of this process with others.


def is_connected() -> bool:
    """Whether anything is set up through which this process exchanges with other nodes."""
    return has_exchanged() or any(
        _probed(probe, sys.modules[name]) for name, probe in _PROBES.items() if name in sys.modules
    )


def _probed(probe: Callable[[Any], bool], module: Any) -> bool:
    try:
        return bool(probe(module))
    except Exception:  # noqa: BLE001 (another version of a library: it may be connected)
        _log.debug("%s cannot be asked for its connections", module, exc_info=True)
        return True


def _has_process_group(distributed: Any) -> bool:
    if not distributed.is_available():
        return False
    return bool(distributed.is_initialized() and distributed.get_world_size() > 1)


def _has_server(context: Any) -> bool:
    """Whether TensorFlow's runtime has a server: strategies, servers and DTensor of several nodes.

    https://github.com/tensorflow/tensorflow/blob/v2.21.0/tensorflow/python/eager/context.py
    """
    now = context.context_safe()
    # `context_safe` does not make a context, which would take the GPUs.
    return now is not None and bool(now._server_def or now._collective_ops_server_def)


def _has_global_arrays(jax: Any) -> bool:
    if not import_module("jax._src.xla_bridge").backends_are_initialized():
        return False  # asking for arrays would take the GPUs
    return any(not array.is_fully_addressable for array in jax.live_arrays())


def _yes(module: Any) -> bool:
    return True


_PROBES: Mapping[str, Callable[[Any], bool]] = MappingProxyType(
    {
        "torch.distributed": _has_process_group,
        "torch.distributed.rpc": lambda rpc: rpc.api._is_current_rpc_agent_set(),
        "tensorflow.python.eager.context": _has_server,
        "jax": _has_global_arrays,
        # Programs that import these exchange by them.
        "horovod": _yes,
        "mpi4py.MPI": _yes,
    }
)


def spans_nodes(model: Any) -> bool:
    """Whether `fit` of this model of Keras, or of tf_keras, trains together with other nodes."""
    if has_exchanged() or any(sys.modules.get(name) for name in ("horovod", "mpi4py.MPI")):
        return True
    backend = _backend_of(model)
    if backend == "tensorflow":
        return _spans_nodes(getattr(model, "_distribute_strategy", None))
    if backend == "jax":
        has_one = import_module("keras").distribution.distribution() is not None
        return has_one and import_module("jax").process_count() > 1
    return backend != "torch" or _has_process_group(import_module("torch.distributed"))


def _spans_nodes(strategy: Any) -> bool:
    if strategy is None:
        return False
    name = type(strategy).__name__
    if name.startswith(("ParameterServer", "TPU")):
        return True
    return bool(strategy.extended._in_multi_worker_mode())


def _backend_of(model: Any) -> str:
    if any(kind.__module__.startswith("tf_keras.") for kind in type(model).__mro__):
        return "tensorflow"
    backend: str = import_module("keras").backend.backend()
    return backend


# Signs that this process trains.

Note = Callable[[str], None]
"""Called with the library whose optimizer takes a step."""


def _hook_torch(note: Note) -> None:
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    def stepped(*_: Any) -> None:
        if not torch.compiler.is_compiling():  # a compiled step would be compiled again each time
            has_lightning = {"lightning.pytorch", "pytorch_lightning"} & sys.modules.keys()
            note("lightning" if has_lightning else "torch")

    register_optimizer_step_post_hook(stepped)


def _hook_keras(note: Note) -> None:
    def applies(stock: Function, *args: Any, **kwargs: Any) -> Any:
        backend = import_module("keras").backend.backend()
        note("tensorflow" if backend == "tensorflow" else f"keras on {backend}")
        return stock(*args, **kwargs)

    Patch("keras.src.optimizers.base_optimizer:BaseOptimizer.apply", ("self",), applies).apply()


def _hook_tf_keras(note: Note) -> None:
    optimizers = "tf_keras.src.optimizers"
    for target in ("optimizer:_BaseOptimizer", "legacy.optimizer_v2:OptimizerV2"):
        noting = functools.partial(_noting, note, "tensorflow")
        Patch(f"{optimizers}.{target}.apply_gradients", ("self",), noting).apply()


def _hook_jax(note: Note) -> None:
    """Note reverse-mode differentiation: JAX has no optimizers of its own.

    Values that processes exchange by `multihost_utils` leave no global arrays behind, so its use is
    noted as well.
    https://github.com/jax-ml/jax/blob/jax-v0.10.2/jax/_src/api.py, `value_and_grad`
    """
    utils = "jax.experimental.multihost_utils"
    for name in ("_psum", "_handle_array_process_allgather"):
        Patch(f"{utils}:{name}", (), _exchanging).apply()
    noting = functools.partial(_noting, note, "jax")
    stock = "_vjp" if hasattr(import_module("jax._src.api"), "_vjp") else "vjp"
    Patch(f"jax._src.api:{stock}", ("fun",), noting).apply()


def _exchanging(stock: Function, *args: Any, **kwargs: Any) -> Any:
    note_exchange()
    return stock(*args, **kwargs)


def _noting(note: Note, library: str, stock: Function, *args: Any, **kwargs: Any) -> Any:
    note(library)
    return stock(*args, **kwargs)


_HOOKS: Mapping[str, Callable[[Note], None]] = MappingProxyType(
    {
        "torch.optim": _hook_torch,
        "keras": _hook_keras,
        "tf_keras": _hook_tf_keras,
        "jax": _hook_jax,
    }
)


class LoneTraining(TrainingWatch):
    """The watch of one of several nodes that train.

    Args:
        report: called at most once, with the feeds that were read and what trains, if an optimizer
            has taken steps and nothing connects this process with others.
        ask: called with the same before a `fit` that would be alone; returns how many nodes, this
            one included, have reported this for one of the feeds.
        framework: of the launch.
        nodes: how many nodes train.
    """

    def __init__(
        self,
        report: Callable[[Sequence[str], str], None],
        ask: Callable[[Sequence[str], str], int],
        framework: str,
        nodes: int,
    ) -> None:
        self._report, self._ask = report, ask
        self._framework, self._nodes = framework, nodes
        self._feeds: dict[str, None] = {}
        self._hooked: set[str] = set()
        self._steps = 0
        self._has_epoch = False
        self._library = ""
        self._is_settled = False

    def iterate(self, feed: str) -> None:
        """Look whether the training is alone, if an epoch has been read before.

        It does not look at the epoch's end: nodes that average their weights after each epoch have
        not done so yet.
        """
        self._feeds[feed] = None
        self._hook()
        if self._has_epoch:
            self._look()

    def epoch_over(self, goes_on: bool) -> None:
        """Note it for the next look."""
        self._has_epoch = self._has_epoch or not goes_on

    def end(self) -> None:
        """Look whether the training was alone: it may have had one epoch."""
        self._look()

    def fit_begins(self, model: Any, feeds: Sequence[str]) -> None:
        """Ask the driver whether another node fits a model of its own as well."""
        if _probed(spans_nodes, model):
            return
        backend = _backend_of(model)
        library = "tensorflow" if backend == "tensorflow" else f"keras on {backend}"
        # One node may be meant to train alone, such as a chief.
        if self._ask(feeds, library) < 2:
            return
        names = ", ".join(map(repr, feeds))
        raise ConfigError(
            f"fit outside of a distribution strategy: {self._nodes} nodes share the rows of feed "
            f"{names}, and this one would train a model of its own on its share, as another one "
            f"does already. {advice(library, self._framework)}"
        )

    def _hook(self) -> None:
        """Notice the steps of the libraries that have been imported since the last time."""
        for name, hook in _HOOKS.items():
            if name in sys.modules and name not in self._hooked:
                # Before the hook: one that failed would fail again in each epoch.
                self._hooked.add(name)
                try:
                    hook(self._stepped)
                except Exception:  # noqa: BLE001 (another version: its steps are not noticed)
                    _log.debug("The steps of %s are not noticed", name, exc_info=True)

    def _stepped(self, library: str) -> None:
        if self._is_settled:
            return
        self._library = library
        self._steps += 1
        # A program may close its connections before it returns, and each look takes time.
        if self._steps & (self._steps - 1) == 0 and is_connected():
            self._is_settled = True

    def _look(self) -> None:
        if self._is_settled or not self._steps or not self._feeds:
            return
        # Before the report, which is made once whatever becomes of it.
        self._is_settled = True
        if not is_connected():
            self._report(tuple(self._feeds), self._library)
