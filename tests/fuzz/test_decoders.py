"""No bytes make a decoder raise anything but its typed error, or take memory that they announce."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.fuzz.inputs import SEED, share
from tests.fuzz.targets import TARGETS, Target

_ROOM_NBYTES = 1 << 29


@contextmanager
def little_memory() -> Iterator[None]:
    """This process may take half a gigabyte more than it has: a length must not be believed."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    limit = pages * resource.getpagesize() + _ROOM_NBYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="there is no /proc")
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_any_input_is_taken_or_refused(target: Target) -> None:
    for sample in target.samples:
        assert target.take(sample), f"{sample!r} is valid, and was refused"
    with little_memory():
        for number, data in enumerate(
            target.inputs(target.samples, share(target.part), target.name)
        ):
            try:
                target.take(data)
            except Exception as error:
                what = f"FUZZ_SEED={SEED}, input {number} of {target.name!r}: {data!r}"
                raise AssertionError(what) from error
