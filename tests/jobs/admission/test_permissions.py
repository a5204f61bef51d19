import time

import pytest

from ringweave.jobs.admission import MAX_CACHED_PERMISSIONS, Permission, PermissionCache

YES, NO = Permission(allowed=True, text="yes"), Permission(allowed=False, text="no")


class Platform:
    """Says what it is told to say, and counts how often it was asked."""

    def __init__(self, answer: Permission | Exception) -> None:
        self.answer = answer
        self.asked: list[tuple[str, str]] = []

    def __call__(self, requester: str, verb: str) -> Permission:
        self.asked.append((requester, verb))
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.mark.parametrize(("answer", "believed_s"), [(YES, 300.0), (NO, 30.0)])
def test_an_answer_is_believed_for_a_while(answer: Permission, believed_s: float) -> None:
    platform = Platform(answer)
    cache = PermissionCache(platform)
    assert cache.get_permission("ann", "submit", 1000.0) is answer
    assert cache.get_permission("ann", "submit", 999.9 + believed_s) is answer
    assert len(platform.asked) == 1
    cache.get_permission("ann", "submit", 1000.0 + believed_s)
    assert len(platform.asked) == 2


def test_people_and_verbs_are_told_apart() -> None:
    platform = Platform(YES)
    cache = PermissionCache(platform)
    for key in (("ann", "submit"), ("bob", "submit"), ("ann", "stop")):
        cache.get_permission(*key, 0.0)
    assert len(platform.asked) == 3


@pytest.mark.parametrize("before", [YES, NO])
def test_an_error_is_passed_on_and_never_kept(before: Permission) -> None:
    platform = Platform(before)
    cache = PermissionCache(platform)
    cache.get_permission("ann", "submit", 0.0)
    platform.answer = ConnectionError("no server")
    for now in (300.0, 300.1):
        with pytest.raises(ConnectionError):
            cache.get_permission("ann", "submit", now)
    platform.answer = NO
    assert cache.get_permission("ann", "submit", 300.2) is NO
    assert len(platform.asked) == 4


def test_strangers_do_not_fill_the_memory() -> None:
    platform = Platform(YES)
    cache = PermissionCache(platform)
    for index in range(MAX_CACHED_PERMISSIONS + 1):
        cache.get_permission(f"user{index}", "submit", 0.0)
    cache.get_permission(f"user{MAX_CACHED_PERMISSIONS}", "submit", 0.0)
    assert len(platform.asked) == MAX_CACHED_PERMISSIONS + 1
    cache.get_permission("user0", "submit", 0.0)
    assert len(platform.asked) == MAX_CACHED_PERMISSIONS + 2


def test_a_hit_takes_less_than_a_millisecond() -> None:
    cache = PermissionCache(Platform(YES))
    for index in range(MAX_CACHED_PERMISSIONS):
        cache.get_permission(f"user{index}", "submit", 0.0)
    taken_s = []
    for _ in range(100):
        begun_s = time.thread_time()
        cache.get_permission("user5000", "submit", 1.0)
        taken_s.append(time.thread_time() - begun_s)
    assert sorted(taken_s)[50] < 0.001
