"""What a child's C library does with memory that a step has freed."""

from __future__ import annotations

import sys

import pytest

from tests.doubles.programs import output_of

_STEPS = """
import resource
import numpy as np
from sparkdl.node.child import keep_freed_memory

def step():
    arrays = [np.ones(25 << 20, np.uint8) for _ in range(3)]

keep_freed_memory()
step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults() -> int:
    """Return how many pages ten steps take from the system that the first has used already."""
    return int(output_of(sys.executable, "-c", _STEPS))


@pytest.mark.skipif(sys.platform != "linux", reason="it is about glibc")
def test_freed_memory_is_used_again_without_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GLIBC_TUNABLES", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"):
        monkeypatch.delenv(name, raising=False)
    assert page_faults() < 100
