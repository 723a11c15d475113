"""Which reducer has the gradients of a parameter: one at a time.

Runs in: child
"""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping
from functools import cache
from typing import TYPE_CHECKING, Protocol
from weakref import ref

if TYPE_CHECKING:
    import torch


class Owner(Protocol):
    """What has the gradients."""

    def detach(self) -> None:
        """Leave them alone from now on."""


def own(owner: Owner, params: Iterable[torch.Tensor]) -> None:
    """Give `owner` the gradients of parameters; those who had some of them before lose them."""
    owners = _owners()
    params = list(params)
    before = {id(it): it for param in params if param in owners and (it := owners[param]())}
    for it in before.values():
        it.detach()
    for param in params:
        owners[param] = ref(owner)


@cache
def _owners() -> MutableMapping[torch.Tensor, ref[Owner]]:
    from torch.utils.weak import WeakIdKeyDictionary

    owners: MutableMapping[torch.Tensor, ref[Owner]] = WeakIdKeyDictionary()
    return owners
