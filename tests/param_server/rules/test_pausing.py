"""A ring that has lost a member holds nobody up, and what it comes back with is applied."""

from hypothesis import given
from hypothesis import strategies as st

from ringweave.param_server.versions import Ledger, StalenessPolicy


def one_round(ledger: Ledger, ring: int) -> int:
    """Take parameters and push what was computed on them; how old it was."""
    base = ledger.grant(ring)
    return ledger.push(ring, len_of(ledger, ring) + 1, base).staleness_versions


def len_of(ledger: Ledger, ring: int) -> int:
    last = ledger.pushed.get(ring)
    return last.sequence if last else 0


@given(num_rings=st.integers(2, 6), num_rounds=st.integers(1, 60))
def test_the_others_go_on_as_long_as_they_like(num_rings: int, num_rounds: int) -> None:
    ledger = Ledger(StalenessPolicy(num_rings=num_rings))
    base = ledger.grant(0)
    ledger.pause(0)
    for _ in range(num_rounds):
        for ring in range(1, num_rings):
            assert ledger.can_grant(ring)
            one_round(ledger, ring)
    assert ledger.check(0, 1, base) == ledger.version - base, "it is applied, however old it is"
    receipt = ledger.push(0, 1, base)
    assert receipt.damping == ledger.policy.damping(receipt.staleness_versions)
    assert not ledger.is_paused(0)


def test_a_ring_that_is_not_paused_holds_the_others_up_at_the_bound() -> None:
    ledger = Ledger(StalenessPolicy(num_rings=2))
    ledger.grant(0)
    while ledger.can_grant(1):
        one_round(ledger, 1)
    assert ledger.version == ledger.policy.max_versions
    ledger.pause(0)
    assert ledger.can_grant(1)


def test_what_it_held_may_be_pushed_however_old_after_it_was_heard_of_again() -> None:
    """With overlap a ring holds two grants; the first push after a pause ends the pause, the second is as old."""
    ledger = Ledger(StalenessPolicy(num_rings=2, overlaps=True))
    ledger.grant(1)
    ledger.push(0, 1, ledger.grant(0))
    ledger.grant(0)
    ledger.pause(0)
    for sequence in range(1, 31):
        ledger.push(1, sequence, ledger.base_version(1) or 0)
        assert ledger.can_grant(1)
        ledger.grant(1)
    ledger.grant(0)
    assert not ledger.is_paused(0)
    receipt = ledger.push(0, 2, ledger.base_version(0) or 0)
    assert receipt.staleness_versions > ledger.policy.max_versions
    assert receipt.damping == ledger.policy.damping(receipt.staleness_versions)


def test_once_it_has_parameters_again_the_bound_holds_for_it() -> None:
    ledger = Ledger(StalenessPolicy(num_rings=2))
    ledger.grant(0)
    ledger.pause(0)
    for _ in range(20):
        one_round(ledger, 1)
    ledger.grant(0)
    oldest = 0
    while ledger.can_grant(1):
        one_round(ledger, 1)
        oldest = ledger.version - (ledger.base_version(0) or 0)
    assert oldest <= ledger.policy.max_versions
