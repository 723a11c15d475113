"""Loads a pickled module of PyTorch."""

from __future__ import annotations

import inspect
import io
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np

from sparkdl.core.errors import ConfigError, FeedTypeError, FrameworkMissingError, InferenceError
from sparkdl.datasets.torch import torch_from
from sparkdl.ml.scoring.predictor import Predictor
from sparkdl.ml.scoring.share import Share
from sparkdl.ml.scoring.source import NUMBER, ModelSource, Signature, Tensor
from sparkdl.values.columns import is_csr
from sparkdl.values.ndarrays import Array
from sparkdl.values.types import TEXT


def _torch() -> Any:
    try:
        import torch
    except ImportError as error:
        raise FrameworkMissingError(
            f"PyTorch cannot be imported here: {error}. Install it: pip install torch"
        ) from error
    return torch


_MAKE = "Score with sparkdl.predict, whose function makes it on the executors"


def save_module(target: Path, module: Any, advice: str = _MAKE) -> None:
    """Write a module as it travels: pickled, its class too where executors cannot import it."""
    torch = _torch()
    if not isinstance(module, torch.nn.Module):
        raise ConfigError(f"a torch.nn.Module must be given, and not {module!r}")
    try:
        # cloudpickle, so that classes of a notebook travel too.
        torch.save(module, target, pickle_module=cloudpickle)
    except Exception as error:
        raise ConfigError(
            f"the module {type(module).__name__} cannot be pickled: {error}. {advice}"
        ) from error


def module_of(source: bytes | Path | str, device: Any = "cpu", maps: bool = False) -> Any:
    """Return the module of `save_module`, by its content or path; it runs what the pickle says.

    Args:
        maps: read weights of a file when they are used, and not now.
    """
    file = io.BytesIO(source) if isinstance(source, bytes) else source
    return _torch().load(file, device, weights_only=False, mmap=maps)


def plain(module: Any) -> Any:
    """Return the module within the wrapper of `torch.compile`, or the module itself."""
    return getattr(module, "_orig_mod", module)


def plain_within(module: Any) -> Any:
    """Return the module, after each compiled part of it gave way to the part itself."""
    for each in list(module.modules()):
        for name, part in each.named_children():
            each._modules[name] = plain(part)
    return module


def module_signature(module: Any) -> Signature:
    """Return the parameters of a module's `forward`; its outputs are only known after a run.

    A parameter that is annotated `list[str]` takes text, any other one numbers.
    """
    required: list[Tensor] = []
    optional: list[Tensor] = []
    module = plain(module)
    for each in inspect.signature(module.forward).parameters.values():
        if each.kind in (each.VAR_POSITIONAL, each.POSITIONAL_ONLY):
            raise ConfigError(
                f"{type(module).__name__}.forward takes {each}, and columns go to parameters by "
                "their names. Wrap it in a module whose forward names its inputs"
            )
        if each.kind != each.VAR_KEYWORD:
            place = required if each.default is each.empty else optional
            takes_text = each.annotation in (list[str], "list[str]")
            place.append(Tensor(each.name, TEXT if takes_text else NUMBER, None))
    return Signature(tuple(required), (), tuple(optional))


def load_torch(source: ModelSource, share: Share | None) -> Predictor:
    import torch

    device = _device(share)
    module = module_of(source.given, device)
    signature = module_signature(module)
    # It may be in training mode, where dropout and batch normalization change results.
    module.eval()
    # PyTorch's layers raise for floats of another dtype than their weights.
    dtype = next((p.dtype for p in module.parameters() if p.is_floating_point()), None)

    def run(inputs: Mapping[str, Array]) -> dict[str, Any]:
        with torch.inference_mode():
            # With memory of their own, which the model may change; rows are others'.
            tensors = {n: _tensor(n, x, dtype, device) for n, x in inputs.items()}
            return by_name(module(**tensors))

    return Predictor(signature, run, _numpy)


def _tensor(name: str, values: Any, dtype: Any, device: Any) -> Any:
    import torch

    if values.dtype == object:  # of texts
        return values.tolist()
    tensor = torch_from(name, values) if is_csr(values) else torch.tensor(values)
    return like_parameters(tensor, dtype, device)


def like_parameters(tensor: Any, dtype: Any, device: Any) -> Any:
    """Return a tensor on a device; of floats in the dtype of the model's parameters, if any."""
    import torch

    if tensor.layout == torch.sparse_csr:
        values = like_parameters(tensor.values(), dtype, device)
        places = (each.to(device) for each in (tensor.crow_indices(), tensor.col_indices()))
        return torch.sparse_csr_tensor(*places, values, tensor.shape)
    is_float = dtype is not None and (tensor.is_floating_point() and dtype.is_floating_point)
    if not is_float or tensor.dtype == dtype:
        return tensor.to(device)
    found = tensor.to(dtype)
    if (lost := torch.isinf(found) & ~torch.isinf(tensor)).any():
        raise FeedTypeError(
            f"an input holds {tensor[lost][0].item()}, which does not fit in {dtype}, the dtype of "
            "the model's parameters: scale the column"
        )
    return found.to(device)


def by_name(found: Any) -> dict[str, Any]:
    """Return what a model gave: a dict's tensors by key, others by place; else lists of text."""
    import torch

    if isinstance(found, Mapping):
        named = found
    elif isinstance(found, tuple | list):
        keys = getattr(found, "_fields", None) or [f"output_{i}" for i in range(len(found))]
        named = dict(zip(keys, found, strict=True))
    else:
        named = {"output_0": found}
    tensors = {str(name): each for name, each in named.items() if isinstance(each, torch.Tensor)}
    texts = {str(name): each for name, each in named.items() if isinstance(each, list)}
    if not (tensors or texts):
        raise InferenceError(f"the model gave a {type(found).__name__} without tensors")
    return tensors or texts


def _numpy(tensor: Any) -> Array:
    import torch

    if isinstance(tensor, list):
        return np.array(tensor, object)
    tensor = tensor.detach()
    values: Array = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).cpu().numpy()
    return np.asarray(values)


def _device(share: Share | None) -> Any:
    import torch

    if share is None:
        return torch.device("cpu")
    torch.set_num_threads(share.cores)
    with suppress(RuntimeError):  # a user's function has run PyTorch in this worker before
        torch.set_num_interop_threads(1)
    if not torch.cuda.is_available():
        return torch.device("cpu")
    count = torch.cuda.device_count()
    mine = [int(gpu) for gpu in share.gpus or () if gpu.isdigit() and int(gpu) < count]
    return torch.device("cuda", mine[0] if mine else share.number % count)
