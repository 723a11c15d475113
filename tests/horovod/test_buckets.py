"""Which gradients travel together."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sparkdl.horovod.common.buckets import FIRST_NBYTES, NBYTES, Slot, plan

MB = 1 << 20


def test_buckets_follow_the_backward_pass_and_the_first_one_is_small() -> None:
    slots = [Slot(30 * MB, "float32")] + [Slot(MB // 2, "float32")] * 6
    layout = plan(slots, order=[6, 5, 4, 3, 2, 0])
    assert layout.buckets == ((6, 5), (4, 3, 2), (0,), (1,))


def test_last_gradients_come_first_where_nothing_is_known_of_their_order() -> None:
    assert plan([Slot(4)] * 3).buckets == ((2, 1, 0),)
    assert plan([Slot(4)] * 3, groups=2).buckets == ((2, 1), (0,))


def test_groups_are_kept_together_where_their_last_gradient_is() -> None:
    slots = [Slot(4, "float32"), Slot(4, "float32"), Slot(4, "float64"), Slot(4, "float32")]
    layout = plan(slots, [3, 2, 1, 0], groups=[[0, 3]])
    assert layout.buckets[-1] == (0, 3)
    assert plan(slots, [3, 2, 1, 0], groups=2).buckets == ((3,), (2,), (1, 0))


def test_sparse_gradients_are_in_no_bucket() -> None:
    layout = plan([Slot(4, "float32")] * 3, [0, 1, 2], sparse={1})
    assert (layout.buckets, layout.sparse) == (((0, 2),), (1,))


@given(
    st.lists(
        st.tuples(st.integers(1, 40 * MB), st.sampled_from(["float32", "float16 cuda:0"])),
        max_size=20,
    ),
    st.randoms(),
    st.integers(0, 6),
)
def test_each_gradient_is_in_one_bucket_of_its_kind(
    sizes: list[tuple[int, str]], random: object, groups: int
) -> None:
    slots = [Slot(*pair) for pair in sizes]
    order = [*range(len(slots))]
    random.shuffle(order)  # type: ignore[attr-defined]
    order = order[: len(order) // 2]
    sparse = set(order[::5])
    layout = plan(slots, order, sparse, groups)
    placed = [number for bucket in layout.buckets for number in bucket]
    assert sorted([*placed, *layout.sparse]) == [*range(len(slots))]
    for bucket in layout.buckets:
        assert len({slots[number].kind for number in bucket}) == 1
        nbytes = sum(slots[number].nbytes for number in bucket)
        assert groups or len(bucket) == 1 or nbytes <= NBYTES
    assert FIRST_NBYTES < NBYTES
