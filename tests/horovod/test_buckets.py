"""Which gradients travel together."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sparkdl.horovod.common.buckets import FIRST_NBYTES, NBYTES, Slot, plan

MB = 1 << 20


def test_last_gradients_come_first_and_the_first_bucket_is_small() -> None:
    slots = [Slot(30 * MB, "float32")] + [Slot(MB // 2, "float32")] * 6
    assert plan(slots) == ((6, 5), (4, 3, 2, 1), (0,))


@given(
    st.lists(
        st.tuples(st.integers(1, 40 * MB), st.sampled_from(["float32", "float16 cuda:0"])),
        max_size=20,
    )
)
def test_each_gradient_is_in_one_bucket_of_its_kind(sizes: list[tuple[int, str]]) -> None:
    slots = [Slot(*pair) for pair in sizes]
    buckets = plan(slots)
    assert sorted(number for bucket in buckets for number in bucket) == [*range(len(slots))]
    for bucket in buckets:
        assert len({slots[number].kind for number in bucket}) == 1
        nbytes = sum(slots[number].nbytes for number in bucket)
        assert len(bucket) == 1 or nbytes <= NBYTES
    assert FIRST_NBYTES < NBYTES
