from ringweave.membership.rules.records import Decree, Standing
from ringweave.training.elastic.joining import layouts
from ringweave.training.elastic.joining.entering import Entrance

LAYOUT = [[12, "float32", "cpu"]]
TEXT = layouts.to_text(LAYOUT)


def decree(*standings: Standing) -> Decree:
    return Decree(ballot=(1, 5), standings=standings)


def holder(member: str, layout: str = TEXT) -> Standing:
    return Standing(member=member, has_state=True, committed=4, layout=layout)


def test_newcomers_follow_where_the_others_have_buckets_and_read_of_one_holder_each() -> None:
    found = Entrance.of(
        decree(Standing(member="0.1"), holder("1.0"), Standing(member="2.3"), holder("3.0"), Standing(member="4.1")),
    )
    assert found.newcomers == (0, 2, 4)
    assert found.followers == {"0.1", "2.3", "4.1"}
    assert found.layout == LAYOUT
    assert [found.donor(rank) for rank in found.newcomers] == [1, 3, 1]
    assert [found.gives(rank) for rank in range(5)] == [False, True, False, True, False]


def test_where_one_alone_has_the_state_the_first_that_follows_is_to_have_it_soon() -> None:
    following = Standing(member="2.3", is_following=True, committed=4)
    alone = decree(Standing(member="0.1"), holder("1.0"), following)
    assert Entrance.of(alone).hurried == "0.1"
    assert Entrance.of(decree(holder("1.0"), following, Standing(member="4.1"))).hurried == "2.3"
    assert Entrance.of(decree(*alone.standings, holder("3.0"))).hurried is None
    assert Entrance.of(decree(holder("0.0"))).hurried is None
    assert Entrance.of(decree(holder("0.0", ""), Standing(member="1.1"))).hurried is None, "it is waited for"


def test_who_follows_already_needs_no_donor_and_gives_nothing() -> None:
    following = Standing(member="1.1", is_following=True, committed=4)
    found = Entrance.of(decree(holder("0.0"), following))
    assert (found.newcomers, found.followers) == ((), {"1.1"})
    assert not found.gives(0)


def test_before_the_first_reduction_newcomers_are_waited_for() -> None:
    found = Entrance.of(decree(holder("0.0", ""), Standing(member="1.1")))
    assert (found.newcomers, found.followers, found.layout) == ((1,), frozenset(), None)


def test_at_the_begin_of_a_job_the_first_member_s_state_becomes_everybody_s() -> None:
    found = Entrance.of(decree(Standing(member="0.0"), Standing(member="1.0")))
    assert (found.holders, found.newcomers, found.followers) == ((0,), (1,), frozenset())
    assert found.gives(0)
