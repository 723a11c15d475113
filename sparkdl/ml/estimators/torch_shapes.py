"""Finds the rows that PyTorch's broadcasting mixes: `[rows, 1]` beside `[rows]`.

Runs in: driver, child
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from itertools import combinations
from typing import Any

from sparkdl.core.errors import ConfigError

_HOME = "torch.nn.functional"
_BY_CLASS = ("cross_entropy", "nll_loss", "multi_margin_loss")
"""Functions of `torch.nn.functional` that take `[rows, 1]` beside `[rows]` and mix no rows."""


@contextmanager
def unmixed(what: str, sources: Mapping[str, Any]) -> Iterator[None]:
    """Refuse an operation of the block that compares each row of one source with all of another.

    Args:
        what: the user's function, for the error.
        sources: tensors, and dicts and sequences of them, by name. Tensors computed from one
            source alone count as that source.

    Raises:
        ConfigError: within the block, at the operation.
    """
    import torch
    from torch.overrides import TorchFunctionMode
    from torch.utils.weak import WeakIdKeyDictionary

    # Weak references, because the block may be a whole training step.
    origins: Any = WeakIdKeyDictionary()
    for name, source in sources.items():
        for tensor in _tensors(source):
            origins[tensor] = frozenset([name])

    class Watch(TorchFunctionMode):  # type: ignore[misc]
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            given = [*args, *(kwargs or {}).values()]
            known = [x for x in given if isinstance(x, torch.Tensor) and x in origins]
            mixed = [
                (pair, shape)
                for pair in combinations(known, 2)
                if not origins[pair[0]] & origins[pair[1]]
                if (shape := _mixed_shape(*pair)) is not None
            ]
            is_home = getattr(func, "__module__", "") == _HOME and func.__name__ not in _BY_CLASS
            # Before the call: PyTorch only warns of this, and its results hide the shape.
            if mixed and is_home:
                raise _error(what, origins, *mixed[0])
            found = func(*args, **(kwargs or {}))
            for pair, shape in mixed:
                if getattr(found, "shape", None) == shape:
                    raise _error(what, origins, pair, shape)
            if names := frozenset().union(*(origins.get(x, ()) for x in _tensors(given))):
                for tensor in _tensors(found):
                    origins[tensor] = names
            return found

    # A compiled function would be traced with the watch in it. PyTorch has this since 2.6.
    is_compiled = "torch._dynamo" in sys.modules and hasattr(torch.compiler, "set_stance")
    with torch.compiler.set_stance("force_eager") if is_compiled else nullcontext(), Watch():
        yield


def _tensors(values: Any) -> list[Any]:
    if isinstance(values, Mapping):
        values = list(values.values())
    if isinstance(values, list | tuple):
        return [tensor for value in values for tensor in _tensors(value)]
    return [values] if hasattr(values, "new_empty") else []


def _mixed_shape(first: Any, second: Any) -> Any:
    """Return the shape that two tensors are broadcast to; None if that mixes no rows."""
    import torch

    is_apart = first.ndim != second.ndim and first.numel() == second.numel()
    if not is_apart or not first.ndim or not second.ndim or not 1 < len(first) == len(second):
        return None
    with suppress(RuntimeError):
        shape = torch.broadcast_shapes(first.shape, second.shape)
        return shape if shape.numel() > first.numel() else None
    return None


def _error(what: str, origins: Any, pair: Any, shape: Any) -> ConfigError:
    first, second = (f"{'/'.join(sorted(origins[x]))} {list(x.shape)}" for x in pair)
    return ConfigError(
        f"{what} puts {first} beside {second}: PyTorch broadcasts them to {list(shape)}, each row "
        "with all rows. Give both the same shape, for example by label.reshape(output.shape) "
        "there; where all pairs are meant, give both as many axes: label[None, :]"
    )
