from ringweave.planning.repartitioning import Lookout, Policy, Window
from tests.planning.repartitioning.worlds import EVEN, changing, cut, workload, world

POLICY = Policy(probing_share=0.001)
SPLITS = (3, 6)


def window(step_s: float, rates: tuple[float, ...] = ()) -> Window:
    """Ten train steps on three devices."""
    rows = tuple((each,) for each in rates)
    return Window(first_step=0, compute_s=((0.1,) * 10,) * 3, step_s=(step_s,) * 10, rates=rows)


def looked_once() -> Lookout:
    lookout = Lookout(POLICY)
    assert lookout.is_due(window(0.5), SPLITS), "nothing is known yet"
    lookout.looked(window(0.5, (1e8, 1e8)), SPLITS, took_s=0.02)
    return lookout


def test_links_are_timed_as_often_as_the_time_is_there() -> None:
    """A window of 5 s saves 5 ms up: 20 ms are there after four."""
    lookout = looked_once()
    assert [lookout.is_due(window(0.5), SPLITS) for _ in range(4)] == [False, False, False, True]


def test_steps_of_another_length_have_links_timed_at_once() -> None:
    lookout = looked_once()
    assert not lookout.is_due(window(0.514), SPLITS)
    assert lookout.is_due(window(0.516), SPLITS)
    assert looked_once().is_due(window(0.48), SPLITS)


def test_another_partition_has_links_timed_at_once() -> None:
    assert looked_once().is_due(window(0.5), (4, 6))


def test_a_slow_link_is_looked_at_until_it_is_given_back() -> None:
    """Also where the partition that holds hardly uses it, so that no step shows it."""
    lookout = looked_once()
    for _ in range(3):
        assert lookout.looked(window(0.5, (1e8, 2e7)), SPLITS, took_s=9.0) is None
        assert lookout.is_due(window(0.5), SPLITS)
    lookout.looked(window(0.5, (1e8, 0.98e8)), SPLITS, took_s=9.0)
    assert not lookout.is_due(window(0.5), SPLITS)


def test_a_link_about_which_nothing_is_known_is_not_slow() -> None:
    lookout = Lookout(POLICY)
    lookout.looked(Window(first_step=0, compute_s=(), step_s=(0.5,) * 10, rates=((), (1e8,))), SPLITS, took_s=9.0)
    assert not lookout.is_due(window(0.5), SPLITS)


def test_links_of_a_steady_pipeline_are_rarely_timed() -> None:
    """100 windows of 6.3 s save 0.63 s up, and a look takes 0.02 s; while a link is slow each window has one."""
    steady = world(workload(), lambda _: EVEN)
    steady.run(1000)
    assert 24 <= steady.num_looks <= 26
    slow = world(workload(), changing({0: cut(0, 1), 100: cut(0, 5)}))
    slow.run(300)
    assert slow.num_looks >= 18 + 3
