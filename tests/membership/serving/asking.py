"""What members ask a coordinator in tests."""

from ringweave import wire
from ringweave.membership.messages import Ask, Count

CALL_S = 60.0


def count(asker: wire.Client) -> Count:
    """What it says of itself and of who is there."""
    answer = asker.call(Ask(), timeout_s=CALL_S).message
    assert isinstance(answer, Count)
    return answer
