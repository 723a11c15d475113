"""How the driver assigns the rows that many simulated agents hold, in simulated time."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace
from random import Random

from sparkdl.control import messages as msg
from sparkdl.control.rows import FeedCount, ReadCounts
from sparkdl.core import throttle
from sparkdl.core.spec import plan_nodes
from sparkdl.core.world import Address, build_world
from sparkdl.driver.feeds import state as fs
from sparkdl.driver.feeds.coverage import CallHistory, FeedRequest
from sparkdl.driver.feeds.transitions import step
from sparkdl.feed.transfer.messages import FedPartition, FeedSpec


class Feeding:
    """A feed's state machine and the agents that spool for it, in simulated time.

    Each agent is brought pieces of 6 MB at 100 MB/s, more or less; nodes read as fast as they can,
    in step.
    """

    PIECE_ROWS, PIECE_NBYTES, RATE_NBYTES_S = 1500, 6_000_000, 100e6
    SECONDS = 4.0

    def __init__(self, nodes: int) -> None:
        self.random = Random(nodes)
        self.ids = range(nodes)
        self.read: Counter[int] = Counter()
        self.got: Counter[int] = Counter()
        self.messages, self.looks_s = 0, list[float]()
        world = build_world(0, {n: Address("host", 1, "grpc://host:1") for n in plan_nodes(nodes)})
        spec = FeedSpec("input", 0, "", (), "token")
        self.nodes = fs.Nodes(0, world)
        feed = fs.Feed(CallHistory("input"), spec, 60.0, self.nodes)
        self.state: fs.State = fs.Idle(feed)
        self.take(fs.Requested(fs.QueuedCall(0, FeedRequest("data"))), 0.0)

    def take(self, event: fs.Event, now_s: float) -> None:
        self.state, actions = step(self.state, event, now_s)
        for action in actions:
            if isinstance(action, fs.Send):
                data, self.messages = msg.encode(action.message), self.messages + 1
                assert data
                if isinstance(action.message, msg.Assign):
                    (node,) = action.node_ids
                    self.got[node] += sum(each.rows for each in action.message.ranges)

    def run(self) -> dict[str, float]:
        """Feed for `SECONDS`; return the figures."""
        brought, due = Counter[int](), {n: self.random.random() * 0.06 for n in self.ids}
        period_s = throttle.period_s(0.02, len(self.ids), throttle.LOTS_PER_S)
        report_s = {n: self.random.random() * period_s for n in self.ids}
        waiting: dict[int, list[msg.SpooledRange]] = {n: [] for n in self.ids}
        now_s, cpu_s = 0.0, 0.0
        while now_s < self.SECONDS:
            now_s += 0.02
            said = []
            for n in self.ids:
                while due[n] <= now_s:
                    first = brought[n] * self.PIECE_ROWS
                    piece = (brought[n], n, first, 0, self.PIECE_ROWS, self.PIECE_NBYTES)
                    waiting[n].append(msg.SpooledRange(*piece))
                    brought[n] += 1
                    due[n] += self.PIECE_NBYTES / self.RATE_NBYTES_S * self.random.uniform(0.5, 1.5)
                if waiting[n] and report_s[n] <= now_s:
                    said.append((n, msg.encode(self.spooled(waiting[n]))))
                    waiting[n], report_s[n] = [], now_s + period_s
            cpu_s += self.look(said, now_s)
        last = [(n, msg.encode(self.spooled(ranges))) for n, ranges in waiting.items() if ranges]
        cpu_s += self.look(last, now_s)
        fed = tuple(FedPartition(n, c * self.PIECE_ROWS) for n, c in brought.items())
        assert isinstance(self.state, fs.Delivering)
        table = self.state.run.table
        self.take(fs.JobEnded(1, fed), now_s)
        rows = sum(brought.values()) * self.PIECE_ROWS
        return {
            "messages/s": self.messages / self.SECONDS,
            "cores": cpu_s / self.SECONDS,
            "longest look, ms": max(self.looks_s) * 1e3,
            "rows moved, %": 100 * table.rows_moved / rows,
            "rows apart": max(self.got.values()) - min(self.got.values()),
        }

    def spooled(self, ranges: list[msg.SpooledRange]) -> msg.Spooled:
        return msg.Spooled(0, "input", 0, tuple(ranges), 1 << 30)

    def look(self, said: list[tuple[int, str]], now_s: float) -> float:
        """Have the driver see what agents have said; return the CPU time that it took, in s."""
        begun_s = time.process_time()
        reports = []
        for node, data in said:
            message = msg.decode_from_agent(data)
            assert isinstance(message, msg.Spooled)
            reports.append((node, message))
        self.messages += len(reports)
        self.take(fs.RowsSpooled(tuple(reports)), now_s)
        step_rows = min(self.got[n] - self.read[n] for n in self.ids)
        self.read.update(dict.fromkeys(self.ids, step_rows))
        counts = {
            n: FeedCount(
                "input",
                rows_received=self.got[n],
                given=ReadCounts(self.read[n]),
                is_waiting=self.read[n] == self.got[n],
            )
            for n in self.ids
        }
        self.take(fs.NodesSeen(replace(self.nodes, counts=counts, progress=int(now_s * 50))), now_s)
        took_s = time.process_time() - begun_s
        self.looks_s.append(took_s)
        return took_s
