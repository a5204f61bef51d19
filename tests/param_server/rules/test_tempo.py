"""Which rings are slow, by how long their pushes take."""

from ringweave.param_server.job import LinkSpeed


def tempo_of(*took_s: float) -> LinkSpeed:
    tempo = LinkSpeed()
    for _ in range(2):
        push_all(tempo, *took_s)
    return tempo


def push_all(tempo: LinkSpeed, *took_s: float) -> None:
    for ring, seconds in enumerate(took_s):
        tempo.push_began(ring, 10.0)
        tempo.push_ended(ring, 10.0 + seconds)


def test_a_ring_is_slow_beside_most_others():
    tempo = tempo_of(1.0, 1.1, 0.9, 9.0)
    assert [tempo.is_slow(ring) for ring in range(5)] == [False, False, False, True, False]


def test_of_two_rings_the_slower_one_is():
    tempo = tempo_of(1.0, 10.0)
    assert [tempo.is_slow(0), tempo.is_slow(1)] == [False, True]


def test_rings_that_share_a_link_evenly_are_not():
    assert not any(map(tempo_of(1.0, 2.0, 1.5, 0.8).is_slow, range(4)))


def test_who_had_most_of_its_push_there_already_makes_nobody_slow():
    tempo = tempo_of(0.43, 0.47, 0.45, 0.46)
    push_all(tempo, 1.70, 0.18, 0.013, 0.013)
    assert not any(map(tempo.is_slow, range(4)))


def test_a_push_that_broke_off_says_nothing():
    tempo = LinkSpeed()
    tempo.push_ended(0, 5.0)
    assert not tempo.is_slow(0)


def test_one_late_push_is_no_slow_link():
    tempo = tempo_of(1.0, 1.1, 0.9)
    push_all(tempo, 1.0, 1.0, 20.0)
    assert not tempo.is_slow(2)
    push_all(tempo, 1.0, 1.0, 20.0)
    push_all(tempo, 1.0, 1.0, 20.0)
    assert tempo.is_slow(2)


def test_a_push_has_stopped_when_it_takes_far_longer_than_usual():
    assert LinkSpeed().push_timeout_s == 10.0
    assert tempo_of(0.01, 0.02).push_timeout_s == 2.0
    assert tempo_of(1.0, 2.0, 3.0, 60.0).push_timeout_s == 15.0
