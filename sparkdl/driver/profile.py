"""What the nodes' processes have done for a while, for tools that draw it.

Runs in: driver
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparkdl.control.messages import Profiled
from sparkdl.core.listing import listed
from sparkdl.node.profiler import PERIOD_S
from sparkdl.version import __version__

_SCHEMA = "https://www.speedscope.app/file-format-schema.json"


@dataclass(frozen=True)
class Profile:
    """What the nodes' processes have done for a while. Made by `Cluster.profile`.

    Attributes:
        seconds: for how long.
        collapsed: by node, a line for each stack: thread and calls, the outermost first, with
            semicolons in between, a space, and the hundredths of a second that it was seen for.
        folders: by node, what the framework's profiler has written into.
        missing: by node, why there is nothing of it.
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
            path: of a file of speedscope if it ends in `.json`; else of collapsed stacks, each of
                which begins with its node.
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
    """Return one profile of the file; `frames` numbers what is in several."""
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
