import io

from ringweave.cli.echo import ProgressPrinter


def test_rounds_are_told_now_and_then_with_the_time_left() -> None:
    now, out = [0.0], io.StringIO()
    progress = ProgressPrinter(out, clock=lambda: now[0])
    progress.print_step("starting")
    now[0] = 60.0
    progress.begin_rounds()
    for index in range(4):
        progress.print_rounds("1MB", index, 10)
        now[0] += 3.0
    assert out.getvalue().splitlines() == ["[ 0:00] starting", "[ 1:06] 1MB: 2 of 10 rounds, about 24 s left of these"]


def test_what_takes_long_is_told_and_what_is_short_is_not() -> None:
    now, out = [0.0], io.StringIO()
    progress = ProgressPrinter(out, clock=lambda: now[0])
    progress.print_if_due("planning ring")
    now[0] = 6.0
    for what in ("planning direct", "planning ps"):
        progress.print_if_due(what)
    for done in range(4):
        progress.print_fraction("simulating ring", done, 8)
        now[0] += 4.0
    lines = ["[ 0:06] planning direct", "[ 0:14] simulating ring: 25% done, about 24 s left"]
    assert out.getvalue().splitlines() == lines
