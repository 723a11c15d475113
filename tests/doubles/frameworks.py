"""Frameworks that do one thing each; named to `launch` as `tests.doubles.frameworks:Name`."""

from __future__ import annotations

import signal
import threading
from importlib import import_module
from types import MappingProxyType

from sparkdl.core.errors import FrameworkMissingError
from sparkdl.core.spec import ClusterSpec
from sparkdl.core.world import Member, World
from sparkdl.frameworks.framework import Framework

_HERE = __name__
MORE = "wsgiref.simple_server"


class LosesPorts(Framework):
    """Takes every OSError for a lost port; tells `map_fun` its round in `ROUND`."""

    import_environment = MappingProxyType({"ITS_OWN": "by default"})

    def environment(self, world: World, member: Member, spec: ClusterSpec) -> dict[str, str]:
        return {"ROUND": str(world.generation)}

    def is_port_lost(self, error: BaseException) -> bool:
        return isinstance(error, OSError)


class LosesPortsEarly(LosesPorts):
    """Binds its port before `map_fun`, in vain."""

    def before_map_fun(self, world: World, member: Member) -> None:
        raise OSError("address already in use")


class ImportsMore(Framework):
    """Imports a module where there is time, as PyTorch what its optimizers' first step would."""

    def import_more(self) -> None:
        import_module(MORE)


class IsMissing(Framework):
    """Cannot be imported."""

    def import_modules(self) -> None:
        raise FrameworkMissingError("frobnicate 3 cannot be imported on this executor")


class Hangs(Framework):
    """Its import does not end."""

    def import_modules(self) -> None:
        threading.Event().wait()


class Breaks(Framework):
    """Its import fails as that of a library does that lacks another one."""

    def import_modules(self) -> None:
        raise OSError("libcublas.so.12: cannot open shared object file")


class Serves(Framework):
    """Has servers, which wait for their end."""

    has_servers = True
    shares_port = True

    def serve(self) -> None:
        while True:
            signal.pause()


LOSES_PORTS = f"{_HERE}:{LosesPorts.__name__}"
LOSES_PORTS_EARLY = f"{_HERE}:{LosesPortsEarly.__name__}"
IMPORTS_MORE = f"{_HERE}:{ImportsMore.__name__}"
IS_MISSING = f"{_HERE}:{IsMissing.__name__}"
HANGS = f"{_HERE}:{Hangs.__name__}"
BREAKS = f"{_HERE}:{Breaks.__name__}"
SERVES = f"{_HERE}:{Serves.__name__}"
