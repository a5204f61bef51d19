"""Credentials by the desk: lodged until it says yes, fetched once for all workers of a node."""

import json

import pytest

from ringweave.errors import LaunchError
from ringweave.platforms.agent.agent_channel import RoundOverError
from ringweave.platforms.agent.job_config import JobConfig, NodeConfig
from ringweave.platforms.kubernetes.agent_main import GATEWAY_TIMEOUT_S, GatewayChannel
from ringweave.rpc import CertificateAuthority


class FakeDesk:
    """Answers what it is told to, in order; then the last of it for ever."""

    def __init__(self, *answers: tuple[int, str] | OSError) -> None:
        self.answers, self.asked = list(answers), list[tuple[str, str]]()
        self.now_s = 0.0

    def request(self, method: str, path: str, body: str | None = None, tag: str = "") -> tuple[int, str, str]:
        self.asked.append((method, path))
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, OSError):
            raise answer
        return *answer, ""

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    def channel(self) -> GatewayChannel:
        return GatewayChannel(self, CONFIG, 1, sleep=self.sleep, clock=lambda: self.now_s)  # type: ignore[arg-type]


CREDENTIALS = CertificateAuthority("job").issue("worker", "3")
NODES = (NodeConfig(index=0, name="n0", workers=3), NodeConfig(index=1, name="n1", workers=2))
CONFIG = JobConfig(job="job", device="cpu", mode="sync", nodes=NODES, script="s.py", min_workers=2)
ISSUED = {f"worker-{rank}": [CREDENTIALS] for rank in range(5)} | {f"coordinator-{index}": [] for index in range(2)}


def test_they_are_lodged_once_the_desk_is_back() -> None:
    desk = FakeDesk(ConnectionRefusedError("refused"), (404, "no such Pod"), (204, ""))
    desk.channel().publish_credentials(2, ISSUED)
    assert desk.asked == [("PUT", "credentials/2/0")] * 3 + [("PUT", "credentials/2/1")]


def test_those_of_all_workers_of_the_node_are_fetched_at_once() -> None:
    texts = {f"worker-{rank}": CREDENTIALS.to_text() for rank in (3, 4)}
    desk = FakeDesk((404, "ask again"), (200, json.dumps(texts)))
    handover = desk.channel()
    assert [handover.take_credentials(1, f"worker-{rank}") == CREDENTIALS for rank in (3, 4)] == [True, True]
    assert desk.asked == [("POST", "credentials/1?holders=worker-3,worker-4")] * 2
    handover.take_credentials(2, "worker-3")
    assert desk.asked[-1] == ("POST", "credentials/2?holders=worker-3,worker-4"), "another round has others"


def test_a_round_that_is_over_is_not_waited_for_and_says_so() -> None:
    desk = FakeDesk((410, "round 2 has begun"))
    text = (
        r"credentials of round 1: '410 round 2 has begun', expected a current round\. "
        r"Nothing to do; this node joins the next round"
    )
    with pytest.raises(RoundOverError, match=text):
        desk.channel().take_credentials(1, "worker-3")
    assert desk.now_s == 0.0


RUBBISH = ["", "null", "[]", '{"worker-3": 1}', "[" * 100_000, '{"worker-3": "KEY"', "{}", '{"worker-4": "KEY"}']


@pytest.mark.parametrize("text", RUBBISH)
def test_what_is_no_credentials_is_refused_and_not_shown(text: str) -> None:
    desk = FakeDesk((200, text))
    expected = r"credentials from the agent gateway: .*, expected the requested credentials\. Run the same ringweave in"
    with pytest.raises(LaunchError, match=expected) as caught:
        desk.channel().take_credentials(1, "worker-3")
    assert "KEY" not in str(caught.value)


@pytest.mark.parametrize(("status", "waits_s"), [(409, 0.0), (503, GATEWAY_TIMEOUT_S)])
def test_a_no_is_final_and_silence_is_not_for_long(status: int, waits_s: float) -> None:
    desk = FakeDesk((status, "not now"))
    text = rf"credentials at the agent gateway: '{status} not now', expected acceptance\. Read the operator's log"
    with pytest.raises(LaunchError, match=text):
        desk.channel().publish_credentials(1, ISSUED)
    assert desk.now_s == waits_s


def test_who_is_told_to_leave_or_called_back_asks_no_longer() -> None:
    """As long as nobody lodges them, which may be for ever: their maker may be gone."""
    desk = FakeDesk((404, "nobody has lodged credentials of round 1; ask again"))
    reasons = iter(["", "", "it got SIGTERM"])
    text = r"credentials of round 1: 'it got SIGTERM', expected a current round"
    with pytest.raises(RoundOverError, match=text):
        desk.channel().take_credentials(1, "worker-3", lambda: next(reasons))
    assert len(desk.asked) == 2
    with pytest.raises(RoundOverError, match="'round 3 is called'"):
        desk.channel().publish_credentials(2, ISSUED, lambda: "round 3 is called")
    assert len(desk.asked) == 2
