"""What members ask a coordinator in tests."""

from ringweave import rpc
from ringweave.membership.messages import CoordinatorStatus, CoordinatorStatusRequest

CALL_S = 60.0


def count(asker: rpc.RpcClient) -> CoordinatorStatus:
    """What it says of itself and of who is there."""
    answer = asker.call(CoordinatorStatusRequest(), timeout_s=CALL_S).message
    assert isinstance(answer, CoordinatorStatus)
    return answer
