"""`ringweave join`: a host that ssh does not reach, with real services on loopback addresses."""

import json
import re
import subprocess

import pytest

from tests.hosts.conftest import FakeHosts

pytestmark = pytest.mark.timeout(240)

HELLO = """
import os
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], "on", os.environ["RINGWEAVE_NODE"])
print(open("data/text.txt").read(), os.access("tool.sh", os.X_OK))
"""


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


def test_a_host_joins_by_one_line(hosts: FakeHosts) -> None:
    folder = hosts.write_script(HELLO)
    (folder / "data").mkdir()
    (folder / "data" / "text.txt").write_text("some data")
    (folder / "tool.sh").write_text("#!/bin/sh\n")
    (folder / "tool.sh").chmod(0o755)
    command, (line,) = start_run(hosts, "--hosts", "a:1,b:1,join:2", "--run-dir", "out", "--name", "train", "train.py")
    wait_for_text(command, "waits for host join-1 to join")
    assert f"type on join-1: ringweave join {line}" in wait_for_text(command, "type on")
    status = hosts.run("status", "train", "--json")
    assert status.returncode == 0, status.stderr
    assert line in json.loads(status.stdout)["reason"]["hint"]
    joined = hosts.run("join", line, host="j")
    out, errors = command.communicate(timeout=90)
    assert (command.returncode, joined.returncode) == (0, 0), errors + joined.stderr
    for rank, node in enumerate(["a", "b", "join-1", "join-1"]):
        assert f"[{rank}] rank {rank} of 4 on {node}" in out.splitlines()
        assert f"[{rank}] some data True" in out.splitlines()
    assert "[2] rank 2 of 4 on join-1" in joined.stdout
    assert "rank 0" not in joined.stdout
    assert (folder / "out" / "hosts" / "join-1" / "join-1" / "1" / "round-1" / "events.jsonl").exists()
    assert not any(joined_files_left(hosts, name) for name in (*hosts.names, "j"))
