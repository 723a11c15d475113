"""Detects a node that reads its share of a feed and has no connection with the other nodes.

If it trains, its model is unrelated to theirs, unless the launch says that this is meant by
`Roles(independent_models=True)`. `fit` of Keras raises at once; other loops log a warning after an
epoch. Everything here looks at libraries that the program has imported. If an installed version
lacks the inspected attributes, it counts as connected.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from types import MappingProxyType
from typing import Any

from sparkdl.core.errors import ConfigError
from sparkdl.core.exchange import collective_used
from sparkdl.feed.reader.reader import TrainingWatch

_log = logging.getLogger(__name__)

_ADVICE: Mapping[str, str] = MappingProxyType(
    {
        "torch": "torch.distributed.init_process_group() at the start of map_fun, and "
        "model = torch.nn.parallel.DistributedDataParallel(model) before the optimizer is made",
        "tensorflow": "strategy = tf.distribute.MultiWorkerMirroredStrategy(), and `with "
        "strategy.scope():` around the code that builds and compiles the model",
        "jax": "mesh = ctx.mesh(data=-1), and ctx.jax_batches(…, sharding=NamedSharding(mesh, "
        "PartitionSpec('data')))",
    }
)
"""By library, the code with which nodes train one model."""


_OPTION = "launch(…, roles=Roles(independent_models=True))"


def is_connected(beside: str = "") -> bool:
    """Whether this process can exchange with other nodes, by other means than `beside`."""
    return collective_used.is_set() or any(
        _probed(probe, sys.modules[name])
        for name, probe in _PROBES.items()
        if name in sys.modules and name != beside
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
    """Whether TensorFlow's runtime has a server: strategies and servers of several nodes.

    https://github.com/tensorflow/tensorflow/blob/v2.21.0/tensorflow/python/eager/context.py
    """
    now = context.context_safe()
    # `context_safe` does not make a context, which would take the GPUs.
    return now is not None and bool(now._server_def or now._collective_ops_server_def)


def _has_global_arrays(jax: Any) -> bool:
    if not import_module("jax._src.xla_bridge").backends_are_initialized():
        return False  # asking for arrays would take the GPUs
    return any(not array.is_fully_addressable for array in jax.live_arrays())


def _always(module: Any) -> bool:
    return True


_TENSORFLOW = "tensorflow.python.eager.context"
_PROBES: Mapping[str, Callable[[Any], bool]] = MappingProxyType(
    {
        "torch.distributed": _has_process_group,
        "torch.distributed.rpc": lambda rpc: rpc.api._is_current_rpc_agent_set(),
        _TENSORFLOW: _has_server,
        "jax": _has_global_arrays,
        # Programs that import these exchange by them.
        "horovod": _always,
        "mpi4py.MPI": _always,
    }
)


def _is_distributed(model: Any) -> bool:
    """Whether the strategy of a model of Keras on TensorFlow trains it on several nodes.

    https://github.com/tensorflow/tensorflow/blob/v2.21.0/tensorflow/python/distribute/distribute_lib.py
    """
    is_legacy = any(kind.__module__.startswith("tf_keras.") for kind in type(model).__mro__)
    if not is_legacy and import_module("keras").backend.backend() != "tensorflow":
        return True
    strategy = getattr(model, "_distribute_strategy", None)
    if strategy is None or type(strategy).__name__.startswith(("ParameterServer", "TPU")):
        return strategy is not None
    return bool(strategy.extended._in_multi_worker_mode())


class IndependentModelCheck(TrainingWatch):
    def __init__(self, framework: str, nodes: int) -> None:
        self._framework, self._nodes = framework, nodes
        self._feed: str | None = None
        self._is_settled = False

    def epoch_over(self, feed: str) -> None:
        """Note it for the next look; a program may close its connections before that."""
        self._feed = feed
        self._is_settled = self._is_settled or is_connected()

    def fit_begins(self, model: Any, feed: str) -> None:
        if _probed(_is_distributed, model) or is_connected(beside=_TENSORFLOW):
            return
        raise ConfigError(
            f"fit outside of a distribution strategy: {self._nodes} nodes share the rows of feed "
            f"{feed!r}, and each would train a separate model on its share. For one model write "
            f"{self._advice('tensorflow')}. If independent models are intended: {_OPTION}"
        )

    def _advice(self, library: str) -> str:
        setting = "" if library == self._framework else f"launch(…, framework={library!r}), "
        return setting + _ADVICE[library]

    def look(self) -> None:
        """Warn once if an epoch has been read, and nothing has connected this node since.

        Called when the next iteration begins, or `map_fun` has returned: nodes that average their
        weights after each epoch have done so by then.
        """
        library = next((name for name in _ADVICE if name in sys.modules), None)
        if self._is_settled or self._feed is None or library is None:
            return
        self._is_settled = True
        if is_connected():
            return
        _log.warning(
            "This node has read an epoch of feed %r without any collective: if the %d nodes train, "
            "they train separate models, each on its share of the rows. For one model write %s. "
            "If independent models are intended, or the nodes communicate by means that sparkdl "
            "does not know: %s",
            self._feed,
            self._nodes,
            self._advice(self._framework if self._framework in _ADVICE else library),
            _OPTION,
        )
