import pytest

from ringweave.comm.regrouping import EpochGroups
from ringweave.errors import PeerError

HERE = "127.0.0.1"


def test_an_epoch_that_was_ordered_before_an_abort_is_not_formed() -> None:
    groups = EpochGroups(HERE)
    num_aborts, place = groups.num_aborts, groups.store_place
    groups.abort()
    with pytest.raises(PeerError, match=r"group of epoch 1\.1: aborted while it was formed\. Form the next one\."):
        groups.form(place, "1.1", 0, 1, num_aborts)
    assert groups.store_place == place, "it was not used"


def test_a_first_member_that_is_gone_is_not_searched_for() -> None:
    groups = EpochGroups(HERE)
    with pytest.raises(PeerError, match=r"group of epoch 1\.2: .*refused, expected all of 2 members\."):
        groups.form(f"{HERE} 9", "1.2", 1, 2, groups.num_aborts)


def test_a_store_is_told_for_one_epoch() -> None:
    groups = EpochGroups(HERE)
    place = groups.store_place
    groups.form(place, "1.3", 0, 1, groups.num_aborts)
    assert groups.store_place != place
    groups.abort()
    groups.leave()
