"""What the charts of a page show of a history: points, marks, what each node does, one axis."""

from __future__ import annotations

from typing import Any

from sparkdl.driver import events
from sparkdl.driver.history import History
from tests.doubles.lazy import Lazy, needs

pytestmark = needs("bokeh")
charts: Any = Lazy("sparkdl.dashboard.charts")
pages: Any = Lazy("sparkdl.dashboard.pages")

KILLED = "worker:1 (rank 1, pid 7) on host-1 was killed by SIGKILL."


def locations(size: int) -> tuple[events.Location, ...]:
    return tuple(events.Location(node_id, node_id, "host") for node_id in range(size))


def sample(time_s: float, loss: list[float | None], **more: Any) -> events.Sampled:
    size = len(loss)
    feed = events.FeedColumns([10] * size, [0] * size, [0] * size, [0] * size)
    states, pids, steps = ["in map_fun"] * size, [1] * size, [int(time_s)] * size
    metrics, feeds = {"loss": loss}, {"input": feed}
    return events.Sampled("c", time_s, states, pids, steps, metrics, feeds, **more)


def history(size: int = 2) -> History:
    """Return that of a training whose node is killed after 10 s, and which begins again at 15."""
    made = History("c", 0.0)
    names = tuple(f"worker:{number}" for number in range(size))
    made.add(events.Launched("c", 0.0, "plain", names))
    made.add(events.Changed("c", 1.0, "running", 0, locations(size)))
    loss: list[float | None] = [2.0, 4.0] * (size // 2)
    for second in range(2, 10):
        made.add(sample(second, loss))
    made.add(events.Checkpoint("c", 8.0, "/c", 1234))
    problem = events.Problem("worker:1", KILLED)
    made.add(events.Changed("c", 10.0, "failing", 0, (), (problem,)))
    made.add(events.Changed("c", 15.0, "running", 1, locations(size), reason=KILLED))
    return made


def test_marks_say_when_and_why_a_node_failed_and_name_checkpoints() -> None:
    axis, made = charts.TimeAxis(), history()
    made.add(events.Changed("c", 20.0, "running", 2, locations(2), reason="a host came back"))
    axis.update(made)
    marks = axis.marks.data
    found = dict(zip(marks["what"], zip(marks["x"], marks["color"], strict=True), strict=True))
    assert list(found) == [
        "worker:1 was killed by SIGKILL",
        "attempt 3: a host came back",
        "checkpoint of step 1,234",
    ]
    assert found["worker:1 was killed by SIGKILL"] == (10_000, "#d9484f")


def test_page_names_the_failure_before_an_attempt_as_its_reason_and_the_state_in_words() -> None:
    made = history()
    assert "attempt 2, because worker:1 was killed by SIGKILL" in pages._headline(made)
    made.add(events.Changed("c", 30.0, "stopped", 1))
    said = pages._attempts(made)
    assert "<td>9 s</td><td>worker:1 was killed by SIGKILL</td>" in said
    assert "<td>15 s</td><td>stopped early</td>" in said
    assert "after 10 s, in attempt 1: worker:1 (rank 1, pid 7)" in pages._problems(made)
    assert [column.model().title for column in pages._NODE_COLUMNS][-1] == "Metrics"


def test_chart_says_the_mean_and_the_spread_of_the_nodes() -> None:
    axis, made = charts.TimeAxis(), history()
    chart = charts.Chart(axis, "<b>loss", {"metric loss": "mean of the nodes"})
    axis.update(made)
    chart.update(made)
    said = chart.root.children[0].text
    assert "&lt;b&gt;loss" in said
    assert "mean of the nodes <b>3</b> <i>(2 to 4)</i>" in said


def test_lanes_say_in_words_what_a_node_did_and_why_it_failed() -> None:
    axis, made = charts.TimeAxis(), history()
    stream = charts.Stream(axis)
    made.add(sample(16.0, [1.0, 1.0]))
    made.add(sample(19.0, [1.0, 1.0]))
    axis.update(made)
    stream.update(made)
    said = stream._bars.data["what"]
    assert "worker:0 working for 13 s, steps 2 to 9" in said
    assert "worker:1 failed for 5 s" in said
    assert "worker:1 working for 3 s, steps 16 to 19" in said
    legend = stream.root.children[0].text
    assert "working" in legend
    assert "stopping" not in legend
