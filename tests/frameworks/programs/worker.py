"""One child of a test: prepares its framework as the real child does, runs programs, reports.

Usage: worker.py <programs as JSON> <ports as JSON> <rank> <folder>

`keras_stock` runs before the framework is prepared, the others after it.
"""

from __future__ import annotations

import json
import os
import sys
from importlib import import_module
from pathlib import Path

from sparkdl.core.spec import WORKER, ClusterSpec, NodeSpec
from sparkdl.core.world import Address, build_world
from sparkdl.frameworks.tensorflow import TensorFlow


def main(programs: list[str], ports: list[int], rank: int, folder: Path) -> None:
    """Run `program.main(rank, folder)` of each in a world of as many workers as there are ports."""
    nodes = tuple(NodeSpec(index, WORKER, index) for index in range(len(ports)))
    addresses = [Address("127.0.0.1", port, "") for port in ports]
    world = build_world(0, dict(zip(nodes, addresses, strict=True)))
    member = world.member(rank)
    framework = TensorFlow()
    framework.import_modules()
    os.environ.update(framework.environment(world, member, ClusterSpec("test", nodes)))
    results = {}
    for program in sorted(programs, key=lambda name: name != "keras_stock"):
        if program != "keras_stock":
            framework.before_map_fun(world, member)
        results[program] = import_module(f"tests.frameworks.programs.{program}").main(rank, folder)
    (folder / f"result-{rank}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), json.loads(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
