import subprocess
import sys
from pathlib import Path

SAYS = """
import os, sys
from ringweave.telemetry import print_line
print_line("lost" * 5000)
print_line("heard", is_error=True)
os.dup2(os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT), 1)
print_line("tried again")
"""


def test_words_that_a_full_disk_does_not_take_are_lost_and_end_nothing(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [sys.executable, "-c", SAYS, str(path)],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    assert (done.returncode, done.stderr) == (0, "heard\n")
    assert path.read_text() == "tried again\n"


def test_where_nothing_takes_them_the_process_ends_as_it_would() -> None:
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [
                sys.executable,
                "-c",
                "from ringweave.telemetry import print_line; print_line('lost'); print_line('lost', is_error=True)",
            ],
            stdout=full,
            stderr=full,
            timeout=60,
            check=False,
        )
    assert done.returncode == 0
