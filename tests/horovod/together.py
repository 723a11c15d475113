"""Runs a function on nodes that exchange: if it fails on one, the others do not wait for it."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from typing import Any

from sparkdl.horovod.common.process_sets import shutdown
from sparkdl.node.context import NodeContext
from tests.doubles.labs import Body, Lab


def together(lab: Lab, body: Body, args: Any = None) -> list[Any]:
    """Return what `body` has returned on each node, by rank; fail with all that it has raised."""
    lab.begin(_Guarded(body), args)
    pairs = lab.results()
    told = [f"rank {rank}: {text}" for rank, (_, text) in enumerate(pairs) if text]
    assert not told, "\n".join(told)
    return [result for result, _ in pairs]


@dataclass(frozen=True)
class _Guarded:
    body: Body

    def __call__(self, args: Any, ctx: NodeContext) -> tuple[Any, str]:
        try:
            return self.body(args, ctx), ""
        except BaseException:  # noqa: BLE001 (what pytest.raises raises is no Exception)
            shutdown()
            return None, traceback.format_exc()
