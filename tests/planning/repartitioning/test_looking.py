from dataclasses import replace

from ringweave.planning.repartition import LinkProbeScheduler, MeasurementWindow, PipelineConditions, RepartitionPolicy
from tests.planning.repartitioning.worlds import EVEN, changing, cut, slowed, workload, world

POLICY = RepartitionPolicy(probing_share=0.001)
WORK = workload(num_blocks=9, num_devices=3)
SPLITS = (3, 6)
BELIEVED = PipelineConditions(speeds=(1.0,) * 3, rates=(1e8, 1e8))
STEP_S = WORK.step_s(SPLITS, BELIEVED)


def window(
    factor: float = 1.0,
    rates: tuple[float, ...] = (),
    speeds: tuple[float, ...] = BELIEVED.speeds,
    splits: tuple[int, ...] = SPLITS,
) -> MeasurementWindow:
    """Ten train steps on three devices of these speeds, which take `factor` times what they should."""
    compute_s = tuple((s / v,) * 10 for s, v in zip(WORK.profiled_s(splits), speeds, strict=True))
    step_s = WORK.step_s(splits, replace(BELIEVED, speeds=speeds)) * factor
    rows = tuple((each,) for each in rates)
    return MeasurementWindow(first_step=0, compute_s=compute_s, step_s=(step_s,) * 10, rates=rows)


def is_due(lookout: LinkProbeScheduler, factor: float = 1.0, **changes) -> bool:
    return lookout.is_due(window(factor, **changes), changes.get("splits", SPLITS), BELIEVED)


def look(lookout: LinkProbeScheduler, rates: tuple[float, ...], took_s: float = 9.0) -> None:
    lookout.record_probe(window(rates=rates), SPLITS, BELIEVED, took_s)


def looked_once(took_s: float = 9.0) -> LinkProbeScheduler:
    lookout = LinkProbeScheduler(WORK, POLICY)
    assert is_due(lookout), "nothing is known yet"
    look(lookout, (1e8, 1e8), took_s)
    return lookout


def test_links_are_timed_as_often_as_the_time_is_there() -> None:
    """A thousandth of ten steps is saved up by each window."""
    lookout = looked_once(took_s=0.035 * STEP_S)
    assert [is_due(lookout) for _ in range(4)] == [False, False, False, True]


def test_steps_that_nothing_explains_have_links_timed_at_once() -> None:
    assert not is_due(looked_once(), 1.028)
    assert is_due(looked_once(), 1.032)
    assert is_due(looked_once(), 0.96)


def test_a_device_that_became_slow_explains_its_steps() -> None:
    lookout = looked_once()
    assert window(speeds=(1.0, 0.5, 1.0)).step_s[0] > 1.3 * STEP_S
    assert not is_due(lookout, speeds=(1.0, 0.5, 1.0))
    assert not is_due(lookout, splits=(2, 6))
    assert is_due(lookout, 1.1, splits=(2, 6)), "another partition takes longer than it should"


def test_a_slow_link_is_looked_at_until_it_is_given_back() -> None:
    """Also where the partition that holds hardly uses it, so that no step shows it."""
    lookout = looked_once()
    for _ in range(3):
        look(lookout, (1e8, 2e7))
        lookout.record_probe(window(rates=(1e8, 2e7)), SPLITS, replace(BELIEVED, rates=(1e8, 2e7)), 9.0)
        assert lookout.is_due(window(), SPLITS, BELIEVED)
    look(lookout, (1e8, 0.98e8))
    assert not is_due(lookout)


def test_a_link_that_seemed_fast_once_is_not_slow_ever_after() -> None:
    lookout = looked_once()
    look(lookout, (1e8, 3e8))
    look(lookout, (1e8, 1e8))
    assert not is_due(lookout)
    look(lookout, (1e8, 3e8))
    look(lookout, (1e8, 2.9e8))
    look(lookout, (1e8, 1e8))
    assert is_due(lookout), "it was as fast twice"


def test_links_that_carry_next_to_nothing_are_timed_on_suspicion_only() -> None:
    fast = replace(BELIEVED, rates=(1e12, 1e12))
    lookout = LinkProbeScheduler(WORK, POLICY)
    usual_s = WORK.step_s(SPLITS, fast)
    steps = replace(window(), step_s=(usual_s,) * 10)
    assert not any(lookout.is_due(steps, SPLITS, fast) for _ in range(30))
    lookout.record_probe(replace(steps, rates=((1e12,), (1e11,))), SPLITS, fast, 0.001)
    assert not lookout.is_due(steps, SPLITS, fast)
    assert lookout.is_due(replace(steps, step_s=(1.04 * usual_s,) * 10), SPLITS, fast)


def test_a_link_about_which_nothing_is_known_is_not_slow() -> None:
    lookout = looked_once()
    lookout.record_probe(replace(window(), rates=((), (1e8,))), SPLITS, BELIEVED, 9.0)
    assert not is_due(lookout)


def test_links_of_a_steady_pipeline_are_rarely_timed() -> None:
    """A look takes 0.02 s, what some windows save up; while a link is slow each window has one."""
    matters = replace(EVEN, rates=(8e7,) * 3)
    steady = world(workload(), lambda _: matters)
    steady.run(1000)
    share = steady.num_looks * 0.02 / sum(step_s for _, step_s in steady.steps)
    assert 0.0005 < share <= POLICY.probing_share
    slow = world(workload(), changing({0: cut(0, 1), 100: cut(0, 5)}))
    slow.run(300)
    assert slow.num_looks >= 18


def test_a_device_that_slows_needs_no_look() -> None:
    train = world(workload(), changing({0: EVEN, 100: slowed(1, 2)}))
    train.run(200)
    assert train.num_looks == 0
    assert len(train.moves()) >= 1
