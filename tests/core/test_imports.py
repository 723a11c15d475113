"""The collector rests for a while."""

from __future__ import annotations

import gc
import sys

import pytest

from sparkdl.core.imports import gc_disabled
from tests.doubles.programs import output_of

LOOKS = """
import gc, threading
from sparkdl.core.imports import frames_of_threads

class Cycle:
    def __init__(self):
        self.local = threading.local()  # whose end takes a lock of the interpreter
        self.itself = self

over = threading.Event()
threads = [threading.Thread(target=over.wait) for _ in range(4)]
for thread in threads:
    thread.start()
gc.set_threshold(1)
for _ in range(50):
    gc.disable()
    garbage = [Cycle() for _ in range(100)]
    del garbage
    free = [{} for _ in range(10)]  # the next dict is one of these, and begins no collection
    del free
    gc.enable()
    found = frames_of_threads()
    assert gc.isenabled()
over.set()
print(len(found))
"""


def test_collector_is_off_inside_and_then_as_it_was_also_after_an_error() -> None:
    with pytest.raises(OSError, match="inside"), gc_disabled():
        assert not gc.isenabled()
        raise OSError("inside")
    assert gc.isenabled()
    gc.disable()
    try:
        with gc_disabled():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_look_at_all_threads_begins_no_collection_that_could_lock_up_the_process() -> None:
    """`sys._current_frames` in its place never returns on Python 3.11.7."""
    assert output_of(sys.executable, "-c", LOOKS, timeout_s=30).split() == ["5"]
