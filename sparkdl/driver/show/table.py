"""A cluster as a small table, a line for each node.

Runs in: driver
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape

from sparkdl.control.messages import FeedCount, NodeActive
from sparkdl.core.spec import ClusterSpec, InputMode
from sparkdl.core.world import Member, World
from sparkdl.driver.controller import View
from sparkdl.driver.lifecycle.outcome import before_stop, failure_of, status_of
from sparkdl.driver.lifecycle.state import Failed, Finished, Gathering, Running, Stopped

_LEFT = ' style="text-align:left"'


def as_html(spec: ClusterSpec, world: World, view: View, board_url: str | None = None) -> str:
    """Return the table: of each node its place, its process, what it does, the rows it has read.

    Args:
        view: while it is held.
        board_url: where TensorBoard answers.
    """
    feeds = sorted({feed for _, feed in view.feeds})
    told = {node_id: active for node_id, active in view.activity.items() if active.step >= 0}
    head = ["node", "rank", "host", "pid", "state", *(f"feed {feed!r}" for feed in feeds)]
    if told:
        head.append("step")
    lines = [_line(head, "th"), *(_line(_cells(m, view, feeds, told), "td") for m in world.members)]
    return "".join(
        [
            f"<b>Cluster {escape(spec.cluster_id)}: {escape(status_of(view.state))}</b>",
            f" ({escape(_what(spec))})",
            f' <a href="{escape(board_url)}">TensorBoard</a>' if board_url else "",
            f"<table>{''.join(lines)}</table>",
            _problem(view),
        ]
    )


def node_state(view: View, node_id: int) -> str:
    """Return what a node does, in a word or two."""
    state = before_stop(view.state)
    if any(failure.node_id == node_id for failure in getattr(state, "failures", ())):
        return "failed"
    if node_id in getattr(state, "left", ()):
        return "failed"
    if node_id in getattr(state, "returned", {}):
        return "returned"
    if isinstance(state, Running) and state is view.state:
        return "in map_fun" if node_id in state.in_map_fun else "starting"
    if isinstance(view.state, Gathering):
        return "starting"
    return "stopped" if isinstance(view.state, (Finished, Failed, Stopped)) else "stopping"


def _what(spec: ClusterSpec) -> str:
    fed = "fed by this driver" if spec.input_mode is InputMode.SPARK else "reads its own data"
    return f"{len(spec.nodes)} nodes, {spec.framework}, {fed}"


def _cells(
    member: Member, view: View, feeds: Iterable[str], told: Mapping[int, NodeActive]
) -> Iterable[str]:
    node_id = member.node.node_id
    pid = view.pids.get(node_id)
    yield from (member.node.name, str(member.rank), member.host, str(pid or ""))
    yield node_state(view, node_id)
    for feed in feeds:
        yield _progress(view.feeds.get((node_id, feed)))
    if told:
        yield _told(told.get(node_id))


def _told(active: NodeActive | None) -> str:
    if active is None:
        return ""
    metrics = (f"{name} {value:.4g}" for name, value in active.metrics.items())
    return ", ".join([f"{active.step:,}", *metrics])


def _progress(count: FeedCount | None) -> str:
    if count is None:
        return ""
    done = {"row": count.rows_consumed, "step": count.steps, "epoch": count.epochs_done}
    return ", ".join(f"{n:,} {what}{'s' * (n != 1)}" for what, n in done.items() if n)


def _line(cells: Iterable[str], tag: str) -> str:
    return f"<tr>{''.join(f'<{tag}{_LEFT}>{escape(cell)}</{tag}>' for cell in cells)}</tr>"


def _problem(view: View) -> str:
    problem = failure_of(view.state)
    if problem is None:
        return ""
    first, *_ = str(problem).splitlines() or [""]
    return f"<pre>{escape(f'{type(problem).__name__}: {first}')}</pre>"
