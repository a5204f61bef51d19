import io

from ringweave.benchmarks.progress import Progress


def test_rounds_are_told_now_and_then_with_the_time_left() -> None:
    now, out = [0.0], io.StringIO()
    progress = Progress(out, clock=lambda: now[0])
    progress.step("starting")
    now[0] = 60.0
    progress.begin_rounds()
    for index in range(4):
        progress.rounds("1MB", index, 10)
        now[0] += 3.0
    assert out.getvalue().splitlines() == ["[ 0:00] starting", "[ 1:06] 1MB: 2 of 10 rounds, about 24 s left of these"]
