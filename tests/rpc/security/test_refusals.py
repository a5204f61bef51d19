from ringweave.rpc.handshake import RefusalLog
from tests.rpc.parts import Events


def test_a_flood_is_written_once_in_ten_seconds_and_counted(events: Events) -> None:
    now = [0.0]
    refusals = RefusalLog("ringweave://j/server/0", events, clock=lambda: now[0])
    for _ in range(1000):
        refusals.add("token", "10.0.0.1", 5, "text")
    refusals.add("token", "10.0.0.2", 5, "text")
    now[0] = 11.0
    refusals.add("token", "10.0.0.1", 6, "text")
    assert [(event["peer"], event["refusals"]) for event in events.seen] == [
        ("10.0.0.1:5", 1),
        ("10.0.0.2:5", 1),
        ("10.0.0.1:6", 1000),
    ]
    assert refusals.total == 1002


def test_many_hosts_do_not_fill_the_memory(events: Events) -> None:
    refusals = RefusalLog("s", events, clock=lambda: 0.0)
    for index in range(5000):
        refusals.add("token", f"10.0.{index // 256}.{index % 256}", 1, "text")
    assert len(refusals._recent) <= 256


def test_a_full_disk_does_not_matter() -> None:
    def record(kind: str, **fields: object) -> None:
        raise OSError(28, "No space left on device")

    refusals = RefusalLog("s", record)
    refusals.add("token", "10.0.0.1", 1, "text")
    assert refusals.total == 1
