"""The user's arguments of a training function.

Runs in: driver, child
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from typing import Any

from sparkdl.core.errors import ConfigError


class Namespace:
    """Arguments as attributes: from a dict, an `argparse.Namespace`, another one, or an argv list.

    As TensorFlowOnSpark's; a list stays a list, in `argv`.

    Args:
        d: any of these; nothing for none.

    Raises:
        ConfigError: if it is something else.
    """

    argv: list[str] | None = None

    def __init__(self, d: Any = None) -> None:
        if isinstance(d, list):
            self.argv = list(d)
        elif d is None or isinstance(d, Mapping):
            self.__dict__.update(d or {})
        elif isinstance(d, (argparse.Namespace, Namespace)):
            self.__dict__.update(vars(d))
        else:
            raise ConfigError(
                f"tf_args is a {type(d).__name__}; give a dict, an argparse.Namespace, or a "
                "list of command-line arguments"
            )

    def __iter__(self) -> Iterator[str]:
        return iter(self.argv if self.argv else list(self.__dict__))

    def __repr__(self) -> str:
        if self.argv:
            return str(self.argv)
        items = ", ".join(f"{name}={value!r}" for name, value in sorted(self.__dict__.items()))
        return f"{type(self).__name__}({items})"

    def __eq__(self, other: object) -> bool:
        if self.argv:
            return self.argv == (other.argv if isinstance(other, Namespace) else other)
        return isinstance(other, Namespace) and self.__dict__ == other.__dict__

    __hash__ = None  # type: ignore[assignment]
