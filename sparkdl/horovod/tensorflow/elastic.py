"""`hvd.elastic` for TensorFlow: models and variables that are there again after a restart.

https://horovod.readthedocs.io/en/v0.28.1/elastic_include.html
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import numpy as np

from sparkdl.core.codes import Code
from sparkdl.core.errors import ConfigError
from sparkdl.horovod.common import HorovodInternalError
from sparkdl.horovod.common.elastic import ObjectState, State
from sparkdl.horovod.common.elastic import run as _run
from sparkdl.horovod.tensorflow.functions import broadcast_variables
from sparkdl.horovod.tensorflow.optimizer import build, variables_of

__all__ = ["ObjectState", "State", "TensorFlowKerasState", "TensorFlowState", "run"]

T = TypeVar("T")


def run(func: Callable[..., T]) -> Callable[..., T]:
    """Decorate the training function; see `sparkdl.horovod.common.elastic.run`.

    Raises:
        HorovodInternalError: as well if an exchange failed inside a graph, where TensorFlow makes
            an error of its own of it.
        CheckpointError: if the last commit cannot be read.
    """

    @functools.wraps(func)
    def watched(*args: Any, **kwargs: Any) -> T:
        import tensorflow as tf

        try:
            return func(*args, **kwargs)
        except HorovodInternalError:
            raise
        except tf.errors.OpError as error:
            # Within a graph only the text of an error remains, so a code in it tells what failed.
            if Code.COLLECTIVE_FAILED.is_in(str(error.message)):
                raise HorovodInternalError(error.message) from error
            raise

    return _run(watched)


class TensorFlowState(ObjectState):
    """The state of some variables, and plain objects.

    Args:
        variables: of TensorFlow or Keras.
        session: accepted for Horovod's sake.
        kwargs: names and first values of further attributes; anything that can be pickled.

    Raises:
        ConfigError: without variables.
    """

    def __init__(
        self, variables: Iterable[Any] | None = None, session: None = None, **kwargs: Any
    ) -> None:
        found = list(variables or ())
        if not found:
            raise ConfigError(
                "give TensorFlowState the variables to keep: TensorFlow 2 has no list of them all"
            )
        super().__init__(variables=found, **kwargs)

    def _copied(self, name: str) -> Any:
        if name != "variables":
            return super()._copied(name)
        return [np.array(variable) for variable in self.variables]

    def _put(self, name: str, kept: Any) -> None:
        if name != "variables":
            super()._put(name, kept)
            return
        own, found = ([tuple(each.shape) for each in values] for values in (self.variables, kept))
        if own != found:
            raise ConfigError(
                f"the last commit has variables of the shapes {found}, and this training {own}: "
                "choose another checkpoint_dir for another model"
            )
        for variable, value in zip(self.variables, kept, strict=True):
            variable.assign(value)

    def _synced(self, name: str) -> bool:
        if name == "variables":
            broadcast_variables(self.variables, root_rank=0)
        return name == "variables"


class TensorFlowKerasState(TensorFlowState):
    """The state of a model of Keras, its optimizer, and plain objects.

    Args:
        model: built.
        optimizer: the model's by default.
        backend: accepted for Horovod's sake.
        kwargs: names and first values of further attributes; anything that can be pickled.

    Raises:
        ConfigError: if the model has not been built.
    """

    def __init__(
        self, model: Any, optimizer: Any = None, backend: Any = None, **kwargs: Any
    ) -> None:
        self.model = model
        self.optimizer = optimizer if optimizer is not None else getattr(model, "optimizer", None)
        if not model.built:
            raise ConfigError("the model is not built: call model.build(input_shape) before")
        if self.optimizer is not None:
            # Now, so that all processes have the same variables to restore and to broadcast.
            build(self.optimizer, model.trainable_variables)
        super().__init__([*model.weights, *variables_of(self.optimizer)], **kwargs)
