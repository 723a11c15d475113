"""What names files, and the wait for a look at them."""

from __future__ import annotations

import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from sparkdl.control.rows import DataFile, Storage
from sparkdl.core.errors import ConfigError, FeedClosedError
from sparkdl.driver.feeds import feeds
from sparkdl.driver.feeds.runner import FeedJob
from sparkdl.storage.parquet.source import ParquetSource
from tests.doubles.nodes import SOON_S


def thread(run: Any, name: str) -> threading.Thread:
    return threading.Thread(target=run, name=name, daemon=True)


def test_share_that_is_too_large_for_a_message_says_what_to_do() -> None:
    named = tuple(DataFile("x" * 1000, 1) for _ in range(10_000))
    files = ParquetSource(Storage("file://"), pa.schema([]), named, ((1,),) * 10_000)
    files.check_fits(2)
    with pytest.raises(ConfigError, match=r"10000 files with .* Write fewer and larger files"):
        files.check_fits(1)


def test_interrupt_ends_the_wait_for_a_look_at_files() -> None:
    over, caller = threading.Event(), threading.get_ident()

    def look() -> Any:
        signal.pthread_kill(caller, signal.SIGINT)
        over.wait(SOON_S)

    own: Any = SimpleNamespace(_executor=SimpleNamespace(thread=thread))
    with pytest.raises(KeyboardInterrupt):
        feeds.Feeds._looked_up(own, "x", look, nodes=1)
    over.set()


def test_job_that_is_cancelled_waits_no_longer_for_the_one_before_it() -> None:
    none: Any = None
    held = FeedJob(none, "f", None)
    job = FeedJob(none, "f", held)
    following = FeedJob(none, "f", job)
    with ThreadPoolExecutor() as pool:
        ran = pool.submit(job.run, none)
        job.cancel()
        with pytest.raises(FeedClosedError, match="'f' was cancelled"):
            ran.result(SOON_S)
        assert not following._is_first(0.0), "the job before both still has their slots"
        held.cancel()
        with suppress(FeedClosedError):
            held.run(none)
        assert following._is_first(0.0)
