import pytest

from ringweave.errors import TrainingError
from ringweave.param_server.versions import StalenessPolicy


@pytest.mark.parametrize(("num_rings", "bound"), [(1, 4), (2, 8), (4, 16)])
def test_the_bound_is_four_versions_for_each_ring(num_rings, bound):
    assert StalenessPolicy(num_rings=num_rings).max_versions == bound


def test_only_what_is_older_than_twice_the_usual_is_damped():
    policy = StalenessPolicy(num_rings=4)
    assert [policy.damping(age) for age in range(7)] == [1.0] * 7
    assert policy.damping(7) == pytest.approx((7 / 8) ** 0.5)
    assert policy.damping(16) == pytest.approx((7 / 17) ** 0.5)


def test_with_overlap_the_usual_age_is_one_round_of_all_rings_higher():
    policy = StalenessPolicy(num_rings=4, overlaps=True)
    assert (policy.steady_versions, policy.damping(14)) == (7, 1.0)
    assert policy.damping(15) == pytest.approx((15 / 16) ** 0.5)


def test_nonsense_is_refused():
    with pytest.raises(TrainingError, match=r"staleness policy: \(0, 0.0\), expected at least one ring"):
        StalenessPolicy(num_rings=0)
