"""A profile of the nodes' processes, and its file formats for viewers.

Runs in: driver
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from sparkdl.control.messages import FetchProfile, Profiled
from sparkdl.core.deadline import Deadline
from sparkdl.core.errors import ConfigError
from sparkdl.core.listing import listed
from sparkdl.core.paths import absolute_url
from sparkdl.core.spec import ClusterSpec
from sparkdl.driver.controller import Controller
from sparkdl.node.profiler import PERIOD_S
from sparkdl.node.profiles import answer_s
from sparkdl.version import __version__

MAX_PROFILE_S = 3600.0
"""The caller blocks for so long."""
_FETCH_S = 5.0
_TOOLS = ("tensorflow", "torch", "jax")
_SCHEMA = "https://www.speedscope.app/file-format-schema.json"


@dataclass(frozen=True)
class Profile:
    """A profile of the nodes' processes. Made by `Cluster.profile`.

    Attributes:
        seconds: for how long.
        collapsed: by node, a line for each stack: thread and calls, the outermost first, with
            semicolons in between, a space, and the hundredths of a second that it was seen for.
        folders: by node, the folder that the framework's profiler has written.
        missing: by node, the reason for a missing profile.
    """

    seconds: float
    collapsed: dict[str, str]
    folders: dict[str, str]
    missing: dict[str, str]

    @classmethod
    def of(cls, seconds: float, answers: Mapping[str, Profiled]) -> Profile:
        """Return the profile that the nodes' answers make."""
        return cls(
            seconds,
            {node: _lines(got.stacks) for node, got in answers.items() if got.stacks},
            {node: got.folder for node, got in answers.items() if got.folder},
            {node: _why(got) for node, got in answers.items() if not (got.stacks or got.folder)},
        )

    def __repr__(self) -> str:
        there = listed([*self.collapsed, *self.folders]) or "no node"
        missing = listed([f"{node}: {why}" for node, why in self.missing.items()], "; ")
        return (
            f"Profile({self.seconds:g} s of {there}{'; nothing of ' if missing else ''}{missing})"
        )

    def save(self, path: str | Path) -> None:
        """Write the stacks of all nodes into a file.

        Args:
            path: ending in `.json` for the format of speedscope; otherwise collapsed stacks are
                written, each after its node.
        """
        text = json.dumps(self.speedscope()) if str(path).endswith(".json") else self._text()
        Path(path).write_text(text, encoding="utf-8")

    def speedscope(self) -> dict[str, Any]:
        """Return the file of https://www.speedscope.app: all nodes as one, then each by itself."""
        by_node = {node: _counts(text) for node, text in self.collapsed.items()}
        every: Counter[str] = Counter()
        for counts in by_node.values():
            every.update(counts)
        frames: dict[str, int] = {}
        all_nodes = {f"all {len(by_node)} nodes": every} if len(by_node) > 1 else {}
        profiles = [
            _sampled(name, counts, frames) for name, counts in {**all_nodes, **by_node}.items()
        ]
        return {
            "$schema": _SCHEMA,
            "shared": {"frames": [{"name": name} for name in frames]},
            "profiles": profiles,
            "name": f"{self.seconds:g} s of {listed(list(by_node))}",
            "activeProfileIndex": 0,
            "exporter": f"sparkdl {__version__}",
        }

    def _text(self) -> str:
        return "".join(
            f"{node};{line}\n" for node, text in self.collapsed.items() for line in text.split("\n")
        )


def taken(controller: Controller, seconds: float, folder: str | None, tool: str | None) -> Profile:
    """Take a profile of all nodes, see `Cluster.profile`.

    Raises:
        ConfigError: if it cannot work as asked, or no node has imported `tool`.
    """
    if not 0 < seconds <= MAX_PROFILE_S:
        raise ConfigError(f"seconds={seconds}: give a number above 0, up to {MAX_PROFILE_S:g}")
    if tool is not None and tool not in _TOOLS:
        raise ConfigError(f"tool={tool!r}: choose one of {', '.join(_TOOLS)}; or None for stacks")
    if tool is not None and folder is None:
        raise ConfigError(f"tool={tool!r} writes files: give a folder that all hosts see")
    path = _own_folder(controller.spec, folder) if folder is not None else ""
    asked = FetchProfile(0, seconds, tool or "", path if tool else "")
    deadline = Deadline.after(seconds + answer_s(asked.tool) + _FETCH_S)
    profile = Profile.of(seconds, controller.questions.fetch_profiles(asked, deadline))
    # The words are those of `Profiler` in `node/profiler.py`.
    if tool and not profile.folders and all("not imported" in p for p in profile.missing.values()):
        raise ConfigError(
            f"tool={tool!r} is imported by no node (yet): the framework of this cluster is "
            f"{controller.spec.framework!r}. Choose that one, or no tool for Python's stacks"
        )
    if path and not tool:
        name = f"{path}/{controller.spec.cluster_id}-{time.strftime('%H%M%S')}"
        profile.save(f"{name}.collapsed.txt")
        profile.save(f"{name}.speedscope.json")
    return profile


def _own_folder(spec: ClusterSpec, folder: str) -> str:
    """Make a folder if it is not there; return its path, the same at all hosts.

    Raises:
        ConfigError: if it is no local or mounted one, or cannot be made.
    """
    url = urlsplit(absolute_url(os.fspath(folder), spec.default_fs, spec.working_dir))
    if url.scheme != "file" or not url.path:
        raise ConfigError(
            f"folder={folder!r} is {url.geturl()}, and profilers write local files: give a path "
            "like file:///mnt/shared/profile, at which a storage is mounted on all hosts"
        )
    try:
        os.makedirs(url.path, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"folder={folder!r} cannot be made: {error}. Give a folder that the driver may write to"
        ) from error
    return url.path


def _why(got: Profiled) -> str:
    return got.problem or "no other thread ran in it"


def _lines(stacks: Mapping[str, int]) -> str:
    return "\n".join(f"{stack} {count}" for stack, count in sorted(stacks.items(), key=_main_first))


def _main_first(item: tuple[str, int]) -> tuple[bool, str]:
    return not item[0].startswith("MainThread;"), item[0]


def _counts(text: str) -> Counter[str]:
    lines = (line.rpartition(" ") for line in text.split("\n"))
    return Counter({stack: int(count) for stack, _, count in lines})


def _sampled(name: str, counts: Mapping[str, int], frames: dict[str, int]) -> dict[str, Any]:
    """Return one profile of the file; `frames` numbers the frames of all profiles."""
    ordered = sorted(counts.items(), key=_main_first)  # so that stacks stand beside their likes
    samples = [
        [frames.setdefault(f, len(frames)) for f in stack.split(";")] for stack, _ in ordered
    ]
    return {
        "type": "sampled",
        "name": name,
        "unit": "seconds",
        "startValue": 0,
        "endValue": sum(counts.values()) * PERIOD_S,
        "samples": samples,
        "weights": [count * PERIOD_S for _, count in ordered],
    }
