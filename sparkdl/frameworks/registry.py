"""The frameworks there are, by name.

Runs in: anywhere
"""

from __future__ import annotations

from importlib import import_module

from sparkdl.core.errors import ConfigError
from sparkdl.frameworks.framework import Framework

_FRAMEWORKS = {
    "jax": "sparkdl.frameworks.jax:Jax",
    "plain": "sparkdl.frameworks.framework:Framework",
    "tensorflow": "sparkdl.frameworks.tensorflow:TensorFlow",
    "torch": "sparkdl.frameworks.torch:Torch",
}


def framework_named(name: str) -> Framework:
    """Return the framework called `name`, or the one at `module:Class`, which may be anybody's.

    Raises:
        ConfigError: if there is none.
    """
    module, _, cls = _FRAMEWORKS.get(name, name).partition(":")
    if not cls:
        known = ", ".join(sorted(_FRAMEWORKS))
        raise ConfigError(
            f"framework={name!r} is not known; choose one of {known}, or name your own subclass of "
            "sparkdl.frameworks.framework.Framework as 'module:Class'"
        )
    try:
        kind = getattr(import_module(module), cls)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"framework={name!r} cannot be imported: {error}") from error
    if not (isinstance(kind, type) and issubclass(kind, Framework)):
        raise ConfigError(f"framework={name!r} is no sparkdl.frameworks.framework.Framework")
    return kind()
