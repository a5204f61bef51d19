"""`ringweave lab` by its real command line."""

import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from ringweave import lab, topology
from ringweave.cli import lab as cli_lab
from ringweave.cli import main
from ringweave.errors import UsageError
from ringweave.lab import cpu_quotas, lab_state, tools

CLUSTER = """
name: pair
nodes:
  - {name: a, nic: 100Mbit/s, devices: [{kind: cpu}, {kind: cpu, speed: 0.5}]}
  - {name: b, switch: r, nic: 100Mbit/s, devices: 1}
switches: [{name: r, uplink: 50Mbit/s}]
"""
VERBS = ("up", "exec", "run", "set", "status", "down", "unshare")


@pytest.fixture
def pair(lab_name: str) -> lab.Lab:
    return lab.up(topology.loads(CLUSTER), lab_name)


@pytest.fixture
def no_labs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without labs, whatever this one has."""
    monkeypatch.setattr(lab_state, "LAB_HOME", tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: 0)


@pytest.mark.parametrize("verb", VERBS)
def test_help(verb: str, check_golden, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    assert main.run_command_line(["lab", verb, "--help"]) == 0
    check_golden(Path(__file__).parent / "golden" / f"help-lab-{verb}.txt", capsys.readouterr().out)


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Callable[..., subprocess.CompletedProcess[str]]:
    """`call("lab", "status")`: the same command line in this process, where all that it imports is there already."""

    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        code = main.run_command_line(list(map(str, arguments)))
        return subprocess.CompletedProcess(arguments, code, *capsys.readouterr())

    return run


def test_from_up_to_down(cli, call, lab_name: str, tmp_path: Path) -> None:
    (tmp_path / "pair.yaml").write_text(CLUSTER)
    up = cli("lab", "up", tmp_path / "pair.yaml", "--name", lab_name, "--quotas", "never", "--json")
    assert up.returncode == 0, up.stderr
    document = json.loads(up.stdout)
    assert (document["name"], document["addresses"]) == (lab_name, {"a": ["10.99.0.1"], "b": ["10.99.0.2"]})
    assert up.stderr.splitlines() == ["ringweave: namespaces ...", "ringweave: links ..."]
    assert lab.find(lab_name).quotas is None

    again = call("lab", "up", tmp_path / "pair.yaml", "--name", lab_name, "--json")
    assert again.returncode == 1
    assert json.loads(again.stdout)["error"].startswith(f"name of the lab: '{lab_name}', expected one that no lab has.")

    down = call("lab", "down", "--lab", lab_name)
    assert (down.returncode, down.stdout) == (0, f"down: {lab_name}\n")
    down = call("lab", "down", "--lab", lab_name, "--json")
    assert (down.returncode, json.loads(down.stdout)) == (0, {"down": []})


def test_exec_becomes_the_command(cli, pair, tmp_path: Path) -> None:
    in_b = ("lab", "exec", "--lab", pair.name, "b")
    done = cli(*in_b, "--", "sh", "-c", "hostname; pwd; cat; exit 9", input="x", cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (9, f"b\n{tmp_path}\nx", "")
    done = cli(*in_b, "echo", "--json", "--", "-x")
    assert (done.returncode, done.stdout) == (0, "--json -- -x\n")
    killed = cli("lab", "exec", "--lab", pair.name, "a", "--", "sh", "-c", "kill -TERM $$")
    assert killed.returncode == -signal.SIGTERM
    group = cli("lab", "exec", "--lab", pair.name, "--device", "1", "a", "--", "cat", "/proc/self/cgroup")
    assert f"/rw-{pair.name}/rw-a:1\n" in group.stdout


def test_a_command_that_is_not_there(cli, pair, tmp_path: Path) -> None:
    (tmp_path / "plain").touch()
    absent = "expected a program on the PATH, or the path of one. Check the name;"
    for command, exit_code, text in [
        ("nosuch", 127, absent),
        ("./nosuch", 127, absent),
        ("./plain", 126, "expected a program that can be run. Make it executable: chmod +x."),
    ]:
        done = cli("lab", "exec", "--lab", pair.name, "a", "--", command, cwd=tmp_path)
        assert (done.returncode, done.stdout) == (exit_code, "")
        assert done.stderr.startswith(f"ringweave: error: command: '{command}', {text}")


def test_set_changes_one_direction_or_both(call, pair) -> None:
    pair.probe_results_folder.mkdir(parents=True)
    (pair.probe_results_folder / "found.json").write_text("{}")
    done = call("lab", "set", "--lab", pair.name, "a->core", "10Mbit/s")
    assert not pair.probe_results_folder.exists(), "what jobs found out about its network is not true any more"
    assert (done.returncode, done.stdout) == (0, "a->core: 10Mbit/s\n"), done.stderr
    assert (pair.rate("a->core"), pair.rate("core->a")) == (1.25e6, 12.5e6)
    done = call("lab", "set", "--lab", pair.name, "r<->core", "20Mbit/s", "--json")
    assert json.loads(done.stdout) == {"lab": pair.name, "rate_bytes_per_s": {"r->core": 2.5e6, "core->r": 2.5e6}}


@pytest.mark.parametrize(
    ("link", "rate", "text"),
    [
        ("a->r", "10Mbit/s", "'a->r', expected one of a->core, core->a,"),
        ("a<->r", "10Mbit/s", "'a->r', expected one of a->core, core->a,"),
        ("a", "10Mbit/s", "'a', expected one of a->core, core->a,"),
        ("a->core", "none", "rate: 'none', expected a number with one of bit/s"),
        ("a<->core", "1bit/s", "rate of link a->core: '1bit/s', expected 8kbit/s to 1Tbit/s in a lab."),
    ],
)
def test_what_cannot_be_set_changes_nothing(pair, capsys, link: str, rate: str, text: str) -> None:
    before = pair.rates()
    assert main.run_command_line(["lab", "set", "--lab", pair.name, link, rate, "--json"]) == 2
    captured = capsys.readouterr()
    assert text in json.loads(captured.out)["error"]
    assert text in captured.err
    assert pair.rates() == before


def test_status_says_what_there_is(call, pair) -> None:
    pair.set_rate("a->core", 1e6)
    with subprocess.Popen(pair.command("b", ["sleep", "60"])) as process:
        wait_inside(pair, process.pid)
        (document,) = json.loads(call("lab", "status", "--lab", pair.name, "--json").stdout)["labs"]
        text = call("lab", "status", "--lab", pair.name).stdout
        process.kill()
    assert (document["name"], document["state"]) == (pair.name, "up")
    assert document["nodes"][1] == {
        "name": "b",
        "switch": "r",
        "interfaces": ["eth0"],
        "addresses": ["10.99.0.2"],
        "cpus_of_devices": [cpu_quotas.quota_in_cpus(us) for us in pair.quotas["b"]],
        "processes": [{"pid": process.pid, "command": "sleep 60"}],
    }
    assert document["links"][0] | {"bytes": 0} == {
        "name": "a->core",
        "rate_bytes_per_s": 1e6,
        "file_rate_bytes_per_s": 12.5e6,
        "bytes": 0,
    }
    assert document["bytes_on_link"] == {link["name"]: link["bytes"] for link in document["links"]}
    lines = text.splitlines()
    assert f"lab {pair.name}: up" in lines
    assert any(line.split()[:3] == ["a->core", "8Mbit/s", "100Mbit/s"] for line in lines)
    assert any(line.split()[:4] == ["r->core", "50Mbit/s", "the", "same"] for line in lines)
    assert any(line.startswith("b     r       10.99.0.2  ") and f"{process.pid} sleep" in line for line in lines)


def wait_inside(where: lab.Lab, pid: int) -> None:
    """Until the process is the command in its node."""
    while pid not in where.processes()["b"] or lab_state.command_line(pid) != "sleep 60":
        assert Path(f"/proc/{pid}").exists()


def test_a_lab_that_was_not_finished_is_told(capsys, no_labs, monkeypatch) -> None:
    (lab_state.lab_folder("half")).mkdir(parents=True)
    assert main.run_command_line(["lab", "status"]) == 0
    assert capsys.readouterr().out == "lab half: incomplete. Clear it away: ringweave lab down --lab half\n"
    assert main.run_command_line(["lab", "status", "--json"]) == 0
    (document,) = json.loads(capsys.readouterr().out)["labs"]
    assert document == {"name": "half", "state": "incomplete", "nodes": [], "links": [], "bytes_on_link": {}}
    assert main.run_command_line(["lab", "exec", "a", "--", "ls"]) == 2
    assert "labs: 'none', expected one that is up. Bring one up first: ringweave lab up" in capsys.readouterr().err


def test_without_a_lab(capsys, no_labs) -> None:
    assert main.run_command_line(["lab", "status"]) == 0
    assert capsys.readouterr().out == "no lab is up\n"
    assert main.run_command_line(["lab", "down"]) == 0
    assert capsys.readouterr().out == "nothing to take down\n"
    assert main.run_command_line(["lab", "down", "--all", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"down": []}
    assert main.run_command_line(["lab", "status", "--lab", "x", "--json"]) == 2
    expected = "lab: 'x', expected one that is up (none is). Bring it up first: ringweave lab up CLUSTER."
    assert json.loads(capsys.readouterr().out) == {"error": expected}


def test_the_only_one_is_meant_if_none_is_named() -> None:
    assert cli_lab._only_lab(["one"]) == "one"
    with pytest.raises(UsageError, match=r"labs: 'one, two', expected one that is up\. Name it: --lab NAME\."):
        cli_lab._only_lab(["one", "two"])


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["down", "--all", "--lab", "x"], "--lab and --all: both given, expected one of them."),
        (["exec", "a", "--"], "command: none given, expected one after --."),
        (["up", "nosuch.yaml"], "nosuch.yaml"),
        (["run", "--order", "blok", "x.py"], "--order: 'blok', expected block, round-robin,"),
        (["run", "nosuch.py"], "script: 'nosuch.py', expected the path of a Python file."),
    ],
)
def test_wrong_input(argv: list[str], text: str, capsys, no_labs) -> None:
    assert main.run_command_line(["lab", *argv]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert text in captured.err


def test_json_after_the_program_is_the_programs(capsys, no_labs) -> None:
    assert main.run_command_line(["lab", "run", "nosuch.py", "--json"]) == 2
    assert main.run_command_line(["lab", "exec", "a", "ls", "--json"]) == 2
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("verb", [["status", "--lab", "x"], ["exec", "--lab", "x", "a", "ls"]])
def test_who_is_not_root_is_told_so(verb: list[str], capsys, no_labs, monkeypatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert main.run_command_line(["lab", *verb]) == 1
    text = "user: 'id 1000', expected root, or a user namespace of this user. Put ringweave lab unshare -- in front"
    assert text in capsys.readouterr().err


def test_without_tools_up_says_what_to_install(capsys, no_labs, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tools, "_search_path", lambda: "/nosuch")
    (tmp_path / "pair.yaml").write_text(CLUSTER)
    assert main.run_command_line(["lab", "up", str(tmp_path / "pair.yaml")]) == 1
    assert "apt install dash hostname iproute2 mount util-linux" in capsys.readouterr().err
