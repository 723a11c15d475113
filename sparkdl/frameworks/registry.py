"""The frameworks there are, by name.

Runs in: anywhere
"""

from __future__ import annotations

from importlib import import_module

from sparkdl.core.errors import ConfigError
from sparkdl.frameworks.framework import Framework

_FRAMEWORKS = {
    "plain": "sparkdl.frameworks.framework:Framework",
    "tensorflow": "sparkdl.frameworks.tensorflow:TensorFlow",
    "torch": "sparkdl.frameworks.torch:Torch",
}


def framework_named(name: str) -> Framework:
    """Return the framework called `name`.

    Raises:
        ConfigError: if there is none.
    """
    try:
        module, _, cls = _FRAMEWORKS[name].partition(":")
    except KeyError:
        known = ", ".join(sorted(_FRAMEWORKS))
        raise ConfigError(f"framework={name!r} is not known; choose one of {known}") from None
    framework = getattr(import_module(module), cls)()
    assert isinstance(framework, Framework)
    return framework
