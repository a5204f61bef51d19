"""`ringweave join`: a host that ssh does not reach, with real services on loopback addresses."""

import hashlib
import json
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from ringweave.cli.main import run_command_line
from ringweave.errors import LaunchError
from ringweave.platforms.hosts import script_files
from ringweave.platforms.hosts.run_entry import HostFolder
from ringweave.platforms.hosts.script_files import FileOffer
from tests.platforms.hosts.conftest import FakeHosts

HELLO = """
import os
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], "on", os.environ["RINGWEAVE_NODE"])
print(open("data/text.txt").read(), os.access("tool.sh", os.X_OK))
"""

UNTIL_FILE = """
import os, time
print("rank", os.environ["RANK"], "begins", flush=True)
while not os.path.exists({path!r}):
    time.sleep(0.05)
"""
JOB = Path(__file__).parents[3] / "bench" / "faults" / "job.py"
SERVICE = "ringweave.platforms.hosts.service"


def start_run(hosts: FakeHosts, *words: str) -> tuple["subprocess.Popen[str]", list[str]]:
    """Start a run; return its command and the lines for joining hosts, once it has printed them."""
    command = hosts.start("run", *words)
    assert command.stderr is not None
    lines: list[str] = []
    number = sum("join" in word for word in words[words.index("--hosts") + 1].split(","))
    seen = ""
    while len(lines) < number:
        text = command.stderr.readline()
        seen += text
        assert text, f"the command has ended: {seen}"
        lines += re.findall(r"type on host join-\d+, within .* minutes: ringweave join (\S+)\.", text)
    return command, lines


def wait_for_text(command: "subprocess.Popen[str]", words: str) -> str:
    """Return the next line of standard error with these words."""
    assert command.stderr is not None
    while words not in (text := command.stderr.readline()):
        assert text, f"the command has ended without {words!r}"
    return text


def joined_files_left(hosts: FakeHosts, name: str) -> bool:
    return bool(hosts.processes(name) or hosts.run_files(name))


def test_a_host_joins_by_one_line_that_serves_it_alone_though_a_service_is_killed(hosts: FakeHosts) -> None:
    folder = hosts.write_script(UNTIL_FILE.format(path=str(hosts.root / "end")) + HELLO)
    (folder / "data").mkdir()
    (folder / "data" / "text.txt").write_text("some data")
    (folder / "tool.sh").write_text("#!/bin/sh\n")
    (folder / "tool.sh").chmod(0o755)
    command, (line,) = start_run(hosts, "--hosts", "a:1,b:1,join:2", "--run-dir", "out", "--name", "train", "train.py")
    wait_for_text(command, "waits for host join-1 to join")
    assert f"type on join-1: ringweave join {line}" in wait_for_text(command, "type on")
    status = hosts.ask("status", "train", "--json")
    assert status.returncode == 0, status.stderr
    assert line in json.loads(status.stdout)["reason"]["hint"]
    token = line.partition("#")[2]
    assert not [path for name in hosts.names for path in hosts.run_files(name) if token in path.read_text()]
    hosts.kill("a", SERVICE)
    joiners = [hosts.start("join", line, host=name) for name in ("j", "k")]
    hosts.wait(lambda: any(each.poll() is not None for each in joiners), "one is refused")
    refused, joined = sorted(joiners, key=lambda each: each.poll() is None)
    _, errors = refused.communicate()
    assert refused.returncode == 2
    assert errors == (
        "ringweave: error: token: 'used already', expected one that this run has printed and nobody has used. Start "
        "the run again for a fresh line; each serves one host once.\n"
    )
    (hosts.root / "end").touch()
    said, errors = joined.communicate(timeout=300)
    assert joined.returncode == 0, errors
    out, errors = command.communicate(timeout=300)
    assert command.returncode == 0, errors
    for rank, node in enumerate(["a", "b", "join-1", "join-1"]):
        assert f"[{rank}] rank {rank} of 4 on {node}" in out.splitlines()
        assert f"[{rank}] some data True" in out.splitlines()
    assert "[2] rank 2 of 4 on join-1" in said
    assert "rank 0" not in said
    assert (folder / "out" / "hosts" / "join-1" / "join-1" / "1" / "round-1" / "events.jsonl").exists()
    assert not any(joined_files_left(hosts, name) for name in (*hosts.names, "j", "k"))


def has_begun(hosts: FakeHosts, name: str) -> bool:
    logs = [path for path in hosts.run_files(name) if path.name.startswith("rank-")]
    return any("begins" in path.read_text() for path in logs)


def read_checks(folder: Path) -> dict[str, dict[int, str]]:
    """Return the checksum of the parameters after each train step, by worker: `RANK.INCARNATION`."""
    found: dict[str, dict[int, str]] = {}
    for path in sorted(folder.glob("*.txt")) if folder.exists() else ():
        rows = [line.split() for line in path.read_text().splitlines()]
        done = {int(row[1]): row[2] for row in rows if len(row) == 4 and row[0] == "done"}
        found[path.stem.partition("-")[0]] = done
    return found


def test_a_host_joins_an_elastic_run_that_trains(hosts: FakeHosts) -> None:
    hosts.write_script(JOB.read_text())
    checks = hosts.root / "checks"
    words = ["train.py", str(hosts.root / "disk"), "--checks", str(checks), "--fresh", "--width", "64"]
    words += ["--s-per-sample", "0.003"]  # workers at full speed would take the processors from those that start
    command, (line,) = start_run(
        hosts, "--hosts", "a,join:1,b", "--elastic", "2:3", "--name", "train", "--run-dir", "out", *words
    )
    hosts.wait(lambda: sum(bool(done) for done in read_checks(checks).values()) == 2, "two workers train")
    wait_for_text(command, "train is Running: host join-1 may join; the others train")
    assert json.loads(hosts.ask("status", "train", "--json").stdout)["reason"]["code"] == "NotJoined"
    hosts.kill("a", SERVICE)
    joiner = hosts.start("join", line, host="j")
    hosts.wait(lambda: len(read_checks(checks).get("2.0", {})) > 3, "the third one trains")
    (path,) = checks.glob("1.0-*.txt")
    os.kill(int(path.stem.partition("-")[2]), signal.SIGKILL)
    hosts.wait(lambda: len(read_checks(checks).get("1.1", {})) > 3, "the second one trains again")
    command.send_signal(signal.SIGINT)
    _, errors = command.communicate(timeout=120)
    assert command.returncode == 1, errors
    assert joiner.wait(60) == 1
    known: dict[int, str] = {}
    for done in read_checks(checks).values():
        assert all(known.setdefault(step, digest) == digest for step, digest in done.items())
    assert set(known) == set(range(1, max(known) + 1))
    assert not any(joined_files_left(hosts, name) for name in (*hosts.names, "j"))


@pytest.mark.thorough
def test_ctrl_c_leaves_the_run(hosts: FakeHosts) -> None:
    hosts.write_script(UNTIL_FILE.format(path=str(hosts.root / "end")))
    command, (line,) = start_run(hosts, "--hosts", "a,join", "--name", "train", "train.py")
    joiner = hosts.start("join", line, host="j")
    hosts.wait(lambda: has_begun(hosts, "j"), "its worker begins")
    joiner.send_signal(signal.SIGINT)
    _, errors = joiner.communicate(timeout=300)
    assert joiner.returncode == 1
    assert "ringweave: leaves train, which fails without this host: it is not elastic.\n" in errors
    assert not joined_files_left(hosts, "j")
    _, errors = command.communicate(timeout=120)
    assert command.returncode == 1
    assert "host join-1 does not answer" in errors
    assert not joined_files_left(hosts, "a")


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (
            "a:1",
            "address to join: 'a:1', expected HOST:PORT#TOKEN. Copy the whole line that ringweave run printed.",
        ),
        (
            "a:1#x",
            "token: '1 characters', expected 80 that fit together. Copy the whole line that ringweave run printed.",
        ),
    ],
)
def test_other_words_are_refused(line: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command_line(["join", line]) == 2
    assert capsys.readouterr().err == f"ringweave: error: {text}\n"


def test_files_are_offered_as_they_were_sent_or_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = HostFolder(root=tmp_path / "run")
    folder.root.mkdir()
    (tmp_path / "shared" / "sub").mkdir(parents=True)
    (tmp_path / "shared" / "sub" / "x.py").write_text("first")
    shared = FileOffer(folder, tmp_path / "shared")
    ((name, digest, mode),) = json.loads(shared.read("", 0, 4096)[1])
    assert (name, digest, shared.read(digest, 2, 2)) == ("sub/x.py", hashlib.sha256(b"first").hexdigest(), (5, b"rs"))
    script_files.save_blob(b"first")
    script_files.lay_out([[name, digest, mode]], folder)
    (folder.files / "sub" / "x.py").write_text("changed by a worker")
    sent = FileOffer(folder, folder.files)
    assert json.loads(sent.read("", 0, 4096)[1]) == [[name, digest, mode]]
    assert sent.read(digest, 0, 4096) == (5, b"first")
    for wrong in ("0" * 64, "../../etc/passwd"):
        with pytest.raises(LaunchError) as caught:
            sent.read(wrong, 0, 4096)
        assert str(caught.value) == f"file of the run: none with digest {wrong!r}, expected one of the list."
    with pytest.raises(LaunchError) as caught:
        script_files.lay_out([["../x.py", digest, mode]], folder)
    assert str(caught.value) == "file ../x.py: outside of the folder, expected a path below it."
