"""What is kept of a cluster: curves, rows of nodes, who waits for whom; and that it stays small."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from sparkdl.driver import events
from sparkdl.driver.history import MAX_POINTS, History

NAMES = ("worker:0", "worker:1", "worker:2")


def history(nodes: tuple[str, ...] = NAMES) -> History:
    made = History("c", 0.0)
    made.add(events.Launched("c", 0.0, "plain", nodes))
    return made


def locations(*node_ids: int) -> tuple[events.Location, ...]:
    return tuple(
        events.Location(node_id, rank, f"host-{node_id}") for rank, node_id in enumerate(node_ids)
    )


def sample(
    time_s: float, received: list[int], used: list[int], steps: list[int] | None = None
) -> events.Sampled:
    size = len(received)
    feed = events.FeedColumns(received, used, [0] * size, [0] * size)
    return events.Sampled(
        *("c", time_s, ["in map_fun"] * size, [1] * size),
        steps or [-1] * size,
        {"loss": [float(node_id) for node_id in range(size)]},
        {"input": feed},
    )


def test_rates_are_of_all_nodes_and_metrics_their_mean() -> None:
    made = history()
    made.add(events.Changed("c", 0.5, "running", 0, locations(0, 1, 2)))
    made.add(sample(1.0, [0, 0, 0], [0, 0, 0]))
    made.add(sample(3.0, [100, 100, 200], [10, 20, 30]))
    columns = made.samples.series.columns
    assert columns["rows in"][-1] == 200.0
    assert columns["rows used"][-1] == 30.0
    assert columns["metric loss"] == [1.0, 1.0]
    assert (columns["least metric loss"], columns["most metric loss"]) == ([0.0] * 2, [2.0] * 2)


def test_waits_are_shares_of_the_last_minute_and_begin_anew_with_a_generation() -> None:
    made = history()
    made.add(events.Changed("c", 0.5, "running", 0, locations(0, 1, 2)))
    others = [0.0, 0.0, -1.0]
    for second in range(0, 200, 10):
        rows = [0.2 * second, float(min(second, 130)), 0.0]
        others = [others[0] + 6.0, others[1], -1.0]
        waits = {"watched": [float(second)] * 3, "rows": rows, "others": others}
        made.add(replace(sample(float(second), [0] * 3, [0] * 3), waits=waits))
    shares = [row.waits for row in made.rows()]
    assert shares[0] == {"rows": pytest.approx(0.2), "others": pytest.approx(0.6)}
    assert shares[1:] == [{"rows": 0.0, "others": 0.0}, {"rows": 0.0}]  # unknown, as with GPUs
    assert made.samples.series.columns["without rows"][-1] == pytest.approx(100 * 0.2 / 3)
    made.add(events.Changed("c", 200.0, "running", 1, locations(0, 1, 2)))
    assert [row.waits for row in made.rows()] == [{}] * 3


@pytest.mark.parametrize("end", ["finished", "failed"])
def test_run_that_has_ended_by_itself_does_not_end_as_stopped(end: str) -> None:
    made = history()
    for time_s, state in enumerate(("running", end, "stopping", "stopped")):
        made.add(events.Changed("c", float(time_s), state, 0))
    assert (made.state, made.changed.state, made.elapsed_s) == (end, "stopped", 1.0)
    aborted = history()
    for time_s, state in enumerate(("running", "stopping", "stopped")):
        aborted.add(events.Changed("c", float(time_s), state, 0))
    assert aborted.state == "stopped"


def test_nodes_are_in_the_order_of_ranks_with_their_rates() -> None:
    made = history()
    made.add(events.Changed("c", 0.5, "running", 0, locations(2, 0, 1)))
    made.add(sample(1.0, [0] * 3, [0] * 3, [0, 0, 0]))
    made.add(sample(11.0, [0] * 3, [0] * 3, [100, 100, 20]))
    rows = made.rows()
    assert [row.name for row in rows] == ["worker:2", "worker:0", "worker:1"]
    assert (rows[0].rate, rows[0].step_s) == (2.0, 0.5)
    assert rows[0].metrics == {"loss": 2.0}
    assert made.rows() is rows, "made once for all that look"


def test_failure_is_kept_and_its_node_failed_until_the_next_generation() -> None:
    made = history()
    made.add(events.Changed("c", 1.0, "running", 0, locations(0, 1, 2)))
    made.add(sample(1.5, [0] * 3, [0] * 3))
    failing = events.Changed(
        "c", 2.0, "failing", 0, (), (events.Problem("worker:1", "worker:1 was killed"),)
    )
    made.add(failing)
    assert [row.problem for row in made.rows()] == ["", "worker:1 was killed", ""]
    made.add(events.Changed("c", 2.5, "gathering", 1, (), failing.problems))
    why = "worker:1 was killed"
    made.add(events.Changed("c", 3.0, "running", 1, locations(0, 1, 2), reason=why))
    assert not any(row.problem for row in made.rows())
    assert len(made.problems) == 1, "it is one failure, however often it is told of"
    assert [(begun.generation, begun.reason) for begun in made.begun] == [
        (0, ""),
        (1, "worker:1 was killed"),
    ]
    phases = [(span.phase, span.end_s) for span in made.spans() if span.node_id == 1]
    assert phases == [
        ("starting", 1.0),
        ("preparing", 1.5),
        ("in map_fun", 2.0),
        ("failed", 3.0),
        ("preparing", 3.0),
    ]


def test_a_day_of_64_nodes_is_kept_in_bounded_room() -> None:
    made = history(tuple(f"worker:{number}" for number in range(64)))
    for second in range(24 * 360):  # each tenth second of a day
        made.add(sample(10.0 * second, [second] * 64, [second] * 64))
        made.add(events.Checkpoint("c", 10.0 * second, "/c/1", second))
    points = len(made.samples.series.columns["time_s"])
    assert MAX_POINTS <= points <= 2 * MAX_POINTS
    assert made.samples.series.columns["time_s"][0] < 10.0
    assert made.samples.series.columns["time_s"][-1] > 23.9 * 3600
    assert {len(column) for column in made.samples.series.columns.values()} == {points}
    assert len(made.checkpoints) <= 1000


def test_what_nodes_take_is_a_mean_of_those_that_have_a_process_in_gib_and_percent() -> None:
    made = history()
    load = {"cores": [1.0, 3.0, 0.0], "memory_nbytes": [2.0**30, 2.0**32, 0.0], "gpu": [0.5] * 3}
    made.add(replace(sample(1.0, [0] * 3, [0] * 3), load=load, pids=[7, 8, 0]))
    columns = made.samples.series.columns
    names = ("cores", "memory_nbytes", "most memory_nbytes", "gpu")
    assert [columns[name] for name in names] == [[2.0], [2.5], [4.0], [50.0]]
