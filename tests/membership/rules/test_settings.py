import pytest

from ringweave.errors import UsageError
from ringweave.membership import settings
from ringweave.membership.settings import MemberBounds


@pytest.mark.parametrize(("text", "least", "most"), [("3:8", 3, 8), ("1:1", 1, 1), ("4", 4, 4)])
def test_bounds_print_as_they_parse(text: str, least: int, most: int) -> None:
    bounds = settings.parse_bounds(text)
    assert bounds == MemberBounds(min_members=least, max_members=most)
    assert settings.parse_bounds(str(bounds)) == bounds


@pytest.mark.parametrize("text", ["", "0:3", "4:3", "a:b", "1:2:3", "-1:2", "9999999:99999999"])
def test_other_bounds_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"--elastic: .*, expected MIN:MAX, two whole numbers with 1 <= MIN <= MAX"):
        settings.parse_bounds(text)
