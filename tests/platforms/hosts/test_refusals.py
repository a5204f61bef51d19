"""Hosts that cannot be used: one line for each, which names the host and a mend, and nothing is left."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from ringweave.cli.main import run_command_line
from ringweave.errors import UsageError
from ringweave.platforms.hosts import host_list, script_files, ssh
from ringweave.platforms.hosts.host_list import HostSpec
from tests.platforms.hosts.conftest import FakeHosts

ErrorOf = Callable[..., str]
REFUSALS = {
    "ssh: connect to host b port 22: Connection refused": "no ssh server at its port",
    "ssh: connect to host b port 22: Connection timed out": "no answer",
    "ssh: connect to host b port 22: No route to host": "no answer",
    "u@b: Permission denied (publickey).": "no key that it accepts",
    "No ED25519 host key is known for b and you have requested strict checking.\nHost key verification failed.": (
        "a host key that is not known"
    ),
    "@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\nHost key verification failed.": (
        "another host key than the known one"
    ),
    "something else": "something else",
}


HOST = HostSpec(node="b", destination="u@b", workers=1)


@pytest.mark.parametrize("text", REFUSALS)
def test_what_ssh_says_becomes_one_line_with_a_mend(text: str) -> None:
    error = str(ssh.ssh_error(HOST, text.splitlines(), 255))
    assert error.startswith(f"host b: {REFUSALS[text]!r}, expected an answer by ssh.")
    assert "\n" not in error


def test_a_host_that_refuses_ends_the_run_with_one_line_and_nothing_is_left(hosts: FakeHosts) -> None:
    hosts.write_script("")
    text = list(REFUSALS)[4]
    (hosts.root / "b.refuses").write_text(text + "\n")
    done = hosts.run("run", "--hosts", "a,b,c", "train.py")
    assert done.returncode == 1
    assert f"ringweave: error: host b: {REFUSALS[text]!r}, expected an answer by ssh." in done.stderr
    assert done.stderr.count("\n") == 1
    assert not any(hosts.processes(name) for name in hosts.names)


def test_all_bad_hosts_are_named_at_once(hosts: FakeHosts) -> None:
    hosts.write_script("")
    done = hosts.run("run", "--hosts", "a,wrong,c,worse", "train.py")
    assert "host wrong: 'a name that cannot be resolved'" in done.stderr
    assert "host worse: 'a name that cannot be resolved'" in done.stderr
    assert "Correct the name in --hosts, or give it an address in ~/.ssh/config." in done.stderr


def test_an_interpreter_without_ringweave_is_named(hosts: FakeHosts) -> None:
    hosts.write_script("")
    done = hosts.run("run", "--hosts", "a", "--python", "/nowhere/python", "train.py")
    assert (
        "host a: 'no ringweave at /nowhere/python', expected an answer by ssh. Install ringweave there" in done.stderr
    )


def test_the_last_line_of_ssh_is_shown() -> None:
    error = ssh.ssh_error(HOST, ["Connection refused"], 255)
    assert str(error).endswith("[--hosts: Connection refused]")
    silent = ssh.ssh_error(HOST, [], 255)
    assert "host b: 'ssh ended with exit code 255'" in str(silent)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a", [("a", "a", 1)]),
        ("a:2,user@B.lab:3", [("a", "a", 2), ("b.lab", "user@B.lab", 3)]),
        ("10.0.0.1:2", [("10.0.0.1", "10.0.0.1", 2)]),
        ("[fd00::1]:2", [("fd00--1", "fd00::1", 2)]),
    ],
)
def test_hosts_are_parsed(text: str, hosts: list[tuple[str, str, int]]) -> None:
    found = host_list.parse_hosts(text)
    assert [(each.node, each.destination, each.workers) for each in found.hosts] == hosts
    assert found.num_workers == sum(count for _, _, count in hosts)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a:0", "workers of host a: '0', expected a whole number from 1 to 1024."),
        ("a:two", "workers of host a: 'two', expected"),
        ("a,,b", "host of --hosts: '', expected HOST:WORKERS."),
        ("-oProxyCommand=x", "host of --hosts: '-oProxyCommand=x', expected HOST:WORKERS."),
        ("a,b,a", "--hosts: 'a twice', expected each host once. Add its workers up: a:2."),
        ("none.yaml", "--hosts: 'none.yaml', expected the path of a cluster file."),
    ],
)
def test_wrong_hosts_are_refused(text: str, problem: str) -> None:
    with pytest.raises(UsageError, match=re.escape(problem)):
        host_list.parse_hosts(text)


def test_a_cluster_file_gives_hosts_with_addresses(tmp_path: Path) -> None:
    path = tmp_path / "lab.yaml"
    nodes = "  - {name: x, nic: 1Gbit/s, devices: 2, address: 10.0.0.1}\n  - {name: y, nic: 1Gbit/s, devices: 1}\n"
    path.write_text(f"name: lab\nnodes:\n{nodes}")
    found = host_list.parse_hosts(str(path))
    assert [(each.node, each.destination, each.workers, each.address) for each in found.hosts] == [
        ("x", "10.0.0.1", 2, "10.0.0.1"),
        ("y", "y", 1, None),
    ]
    assert found.cluster_text == path.read_text()


def test_ignored_files_stay_here(tmp_path: Path) -> None:
    for name in ("train.py", "lib/a.py", "data/big.bin", "lib/skip.log", "runs/1/run.json", "venv/pyvenv.cfg"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / ".gitignore").write_text("data/\n*.log\n")
    found = script_files.collect_files(tmp_path)
    assert [each.relative for each in found] == [".gitignore", "lib/a.py", "train.py"]


def test_too_many_bytes_are_refused_with_the_largest(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    (tmp_path / "data").mkdir()
    with (tmp_path / "data" / "big.bin").open("wb") as file:
        file.truncate(script_files.MAX_FILES_BYTES + 1)
    with pytest.raises(UsageError, match=re.escape("files of the script's directory: 'more, the largest so far: data")):
        script_files.collect_files(tmp_path)


@pytest.fixture
def error_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> ErrorOf:
    """`error_of("run", ..)`: what a command says that is refused for wrong usage; no host can be asked."""
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))

    def run(*words: str) -> str:
        assert run_command_line(list(words)) == 2
        return capsys.readouterr().err

    return run


def test_programs_that_are_not_here_are_refused_before_any_host_is_asked(tmp_path: Path, error_of: ErrorOf) -> None:
    for words, text in (
        (("-m", "nosuch"), "module: 'nosuch', expected a module that `python -m` finds from this directory."),
        (("--", "./nosuch"), "command: './nosuch', expected a program on the PATH, or the path of one."),
    ):
        assert text in error_of("run", "--hosts", "wrong", *words)
    job = "name: filed\ncpu_workers: 1\nmin_per_node: 1\nnodes: [{name: wrong, capacity: 1}]\n"
    for program in ("script: sub/nosuch.py", "module: nosuch", "command: ./nosuch"):
        (tmp_path / "job.yaml").write_text(f"{job}{program}\n")
        assert f"error: {program.partition(':')[0]}: " in error_of("submit", "--on", "hosts", "--yes", "job.yaml")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("--hosts a --workers 2", "--hosts: 'beside --workers', expected none of these. Leave --workers out"),
        ("--install", "--install: 'no --hosts', expected a run on hosts. Add --hosts, or leave it out."),
        (
            "--hosts a,b --standby --mode ps-hra",
            "--standby: 'no --elastic', expected an elastic run on hosts. Add",
        ),
        (
            "--hosts a,b --standby --elastic 1:2 --mode sync",
            "--standby with --mode: 'sync', expected ps-hra, ps or local. Leave --standby out",
        ),
    ],
)
def test_options_that_hosts_do_not_have_are_refused(words: str, text: str, error_of: ErrorOf) -> None:
    assert text in error_of("run", *words.split(), "train.py")
