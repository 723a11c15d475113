"""The bar of progress on a real terminal, of a real training whose node is killed."""

from __future__ import annotations

import re

import pytest

from tests.doubles.screen import on_screen, written_by

PROGRAM = """
import os, signal, tempfile, threading
from pathlib import Path
import sparkdl

def train(args, ctx):
    last = ctx.last_checkpoint
    step = last.step if last else 0
    for epoch in range(2):
        for step, batch in enumerate(ctx.batches(50), step + 1):
            ctx.barrier()
            threading.Event().wait(0.05)
            ctx.report(step, loss=1.0 / step)
            if step % 10 == 0:
                print("step", step, flush=True)
                with ctx.checkpoint(step) as folder:
                    (folder / str(ctx.rank)).touch()
            if step == 25 and ctx.rank == 1 and not Path(args).exists():
                Path(args).touch()
                os.kill(os.getpid(), signal.SIGKILL)

rows = [(float(n),) for n in range(3000)]
with tempfile.TemporaryDirectory() as folder:
    about = dict(framework="plain", executor="local", max_restarts=1, checkpoint_dir=folder)
    with sparkdl.launch(None, train, folder + "/killed", 2, **about) as cluster:
        cluster.feed(rows, epochs=2)
print("the program ends")
"""


@pytest.mark.timeout(120)
@pytest.mark.parametrize("columns", [80, 200])
def test_one_bar_goes_on_over_a_restart_and_all_other_lines_stand_alone(
    columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARKDL_DASHBOARD", "0")
    written = written_by(PROGRAM, columns)
    *said, end, rest = on_screen(written)
    assert (end, rest) == ("the program ends", "")
    # A node's last lines may come after the feed, and so below its bar.
    (bar,) = (line for line in said if line.startswith("feed 'input'"))
    said.remove(bar)
    (restart,) = (line for line in said if "restart 1 of 1 because worker:1" in line)
    assert restart.endswith("was killed by SIGKILL.")
    said.remove(restart)
    steps = [int(line.removeprefix("[worker:0] step ")) for line in said]
    assert sorted({*steps}) == [10, 20, 30, 40, 50, 60]

    rate = r", .* rows/s" if columns == 200 else ""
    shown = r"feed 'input', 2 epochs: +\d+%\|.*\| (\d+)/6000 \[\d\d:\d\d<[\d:?]+{}, loss=[\d.]+\]"
    assert re.fullmatch(shown.format(rate).replace(r"(\d+)", "6000"), bar), bar
    assert len(bar) < columns
    before, after = (
        [int(rows) for rows in re.findall(shown.format(rate), part)]
        for part in written.split("restart 1 of 1")
    )
    assert before
    assert max(before) < max(after) == 6000, "the bar counts on, and says the loss each time"
