"""Hosts' clocks are measured by messages there and back, and times keep their order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sparkdl.driver.clocks import HostClock

OFFSET_US = 5_000_000_000


def test_time_is_within_half_of_the_way_there_and_back() -> None:
    clock = HostClock()
    assert not clock.is_known
    clock.sample(1000, 1900 - OFFSET_US, 2000)  # nearly all of the time on the way there
    assert clock.error_us == 501
    assert abs(clock.driver_us(1900 - OFFSET_US) - 1900) <= clock.error_us


def test_fastest_answer_decides_until_a_time_has_been_converted() -> None:
    clock = HostClock()
    for sent_us, late_us, back_us in ((0, 9000, 10_000), (20_000, 50, 100), (30_000, 1, 9000)):
        clock.sample(sent_us, sent_us + late_us - OFFSET_US, sent_us + back_us)
    assert clock.error_us == 51
    assert clock.driver_us(25_000 - OFFSET_US) == 25_000


def test_better_answer_counts_for_later_times_and_is_approached_slowly() -> None:
    clock = HostClock()
    clock.sample(0, 9000 - OFFSET_US, 10_000)  # 4000 off
    before = clock.driver_us(9000 - OFFSET_US)
    assert before == 5000
    clock.sample(20_000, 20_050 - OFFSET_US, 20_100)
    assert clock.driver_us(9000 - OFFSET_US) == before
    assert clock.driver_us(20_050 - OFFSET_US) == 16_050
    assert clock.driver_us(120_050 - OFFSET_US) == 117_050
    assert clock.driver_us(2_000_000 - OFFSET_US) == 2_000_000
    assert clock.error_us == 5001


def test_answer_of_before_the_last_one_is_left_out() -> None:
    clock = HostClock()
    clock.sample(0, 100, 200)
    clock.sample(0, 50, 10)
    clock.sample(10, 150, 0)
    assert clock.driver_us(100) == 100


@given(
    st.lists(
        st.tuples(st.integers(0, 10**6), st.integers(0, 10**5), st.integers(0, 10**5)), min_size=1
    ),
    st.lists(st.integers(0, 10**8), min_size=2),
)
def test_times_keep_their_order_whatever_is_measured(
    answers: list[tuple[int, int, int]], times: list[int]
) -> None:
    clock, now_us = HostClock(), 0
    told: dict[int, int] = {}
    for rest_us, there_us, back_us in answers:
        now_us += rest_us
        clock.sample(now_us, now_us + there_us - OFFSET_US, now_us + there_us + back_us)
        now_us += there_us + back_us
        for time in times:
            if time <= now_us - back_us:  # what has been told is of before the answer
                driver_us = clock.driver_us(time - OFFSET_US)
                assert told.setdefault(time, driver_us) == driver_us
    ordered = sorted(times)
    converted = [clock.driver_us(time - OFFSET_US) for time in ordered]
    assert converted == sorted(converted)
