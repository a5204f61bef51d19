"""Allreduces on small clusters, for the tests of the simulator."""

from random import Random

from hypothesis import strategies as st

from ringweave.schedules import Schedule
from ringweave.schedules.program import Pipelining
from ringweave.sim import HostModel
from tests.schedules import generated

PIPELININGS = st.builds(Pipelining, num_segments=st.integers(1, 5), lag=st.integers(0, 4), window=st.integers(1, 6))
MACHINES = st.builds(
    HostModel,
    message_s=st.sampled_from([0.0, 1.0, 30.0]),
    inside_message_s=st.sampled_from([0.0, 2.0]),
    wake_s=st.sampled_from([0.0, 3.0]),
    combine_s_per_byte=st.sampled_from([0.0, 0.01]),
    inside_s_per_byte=st.sampled_from([0.0, 0.02]),
    send_buffer_bytes=st.sampled_from([0.0, 40.0, float("inf")]),
    receive_buffer_bytes=st.sampled_from([0.0, 100.0, float("inf")]),
    kernel_s_per_byte=st.sampled_from([0.0, 0.05]),
    start_s=st.sampled_from([0.0, 5.0]),
    burst_bytes=st.sampled_from([7.0, 40.0, float("inf")]),
    window_bytes=st.sampled_from([1.0, 60.0, float("inf")]),
    unevenness=st.sampled_from([0.0, 1.0]),
    num_processors=st.none() | st.integers(1, 3),
)


def message_bytes(schedule: Schedule, pipelining: Pipelining) -> int:
    """A size at which every chunk of every segment has whole elements."""
    return 4 * sum(schedule.shares) * pipelining.num_segments


def any_allreduce(num_ranks: int, seed: int) -> Schedule:
    """One that a real generator makes."""
    random = Random(seed)
    return generated.ALLREDUCES[random.choice(sorted(generated.ALLREDUCES))](num_ranks, random)
