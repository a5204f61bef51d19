import io
import json
import sys
from pathlib import Path

import pytest

from ringweave.cli import echo, main

GOLDEN = Path(__file__).parents[1] / "golden" / "plan"
RACKS = "examples/clusters/two-racks.yaml"


@pytest.mark.parametrize("name", ["two-racks", "two-unequal-nodes"])
def test_the_screen(name: str, check_golden, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run_command_line(["plan", f"examples/clusters/{name}.yaml", "--bytes", "25MB"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    check_golden(GOLDEN / f"{name}.txt", captured.out)


def test_the_document(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run_command_line(["plan", RACKS, "--bytes", "25MB", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["bytes"], found["bound_s"], found["chosen"]) == (25_000_000, 1.0, "leader-matrix")
    assert found["binding"] == "cut: all that leaves a-0, a-1, a-2, a-3 passes r0->core (200Mbit/s)"
    assert found["leaders"] == [0, 1, 2, 3, 4, 5, 6, 7]
    assert found["matrix"] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    by_name = {choice["schedule"]: choice for choice in found["choices"]}
    assert by_name["ring"]["fraction_of_bound"] == pytest.approx(1 / 1.75, rel=0.01)
    assert by_name["multi-level"]["fraction_of_bound"] > 0.95
    for choice in found["choices"]:
        assert choice["fraction_of_bound"] == pytest.approx(found["bound_s"] / choice["predicted_s"])


def test_the_screen_of_another_collective(check_golden, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run_command_line(["plan", RACKS, "--collective", "allgather", "--simulate", "0"]) == 0
    check_golden(GOLDEN / "allgather.txt", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("kind", "bound_s", "chosen"),
    [("reduce-scatter", 0.5, "multi-level"), ("allgather", 0.5, "multi-level"), ("broadcast", 1.0, "ring")],
)
def test_the_document_of_another_collective(
    kind: str, bound_s: float, chosen: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run_command_line(["plan", RACKS, "--collective", kind, "--simulate", "0", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["collective"], found["bound_s"], found["chosen"]) == (kind, bound_s, chosen)
    assert [choice["schedule"] for choice in found["choices"]] == ["multi-level", "ring", "direct"]
    assert found["choices"][0]["fraction_of_bound"] > 0.97
    assert "r0->core" in found["binding"]


def test_the_screen_of_a_wire_format(check_golden, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run_command_line(["plan", RACKS, "--wire", "int8"]) == 0
    check_golden(GOLDEN / "int8.txt", capsys.readouterr().out)


def test_auto_says_why_it_stays_exact(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run_command_line(["plan", "examples/clusters/two-unequal-nodes.yaml", "--wire", "auto"]) == 0
    assert "(predicted): a format would gain less than 10 %\n" in capsys.readouterr().out


def test_the_document_of_a_wire_format(capsys: pytest.CaptureFixture[str]) -> None:
    found = {}
    for wire in ("exact", "bf16", "int8", "auto"):
        assert main.run_command_line(["plan", RACKS, "--wire", wire, "--simulate", "0", "--json"]) == 0
        found[wire] = json.loads(capsys.readouterr().out)
    assert [each["wire"] for each in found.values()] == ["exact", "bf16", "int8", "int8"]
    assert [found[wire]["bytes_on_link"]["r0->core"] / 25e6 for wire in ("exact", "bf16", "int8")] == pytest.approx(
        [1, 0.5, 0.252], rel=1e-2
    )
    assert found["int8"]["choices"][0]["predicted_s"] < 0.3 * found["exact"]["choices"][0]["predicted_s"]


@pytest.mark.parametrize("verb", ["plan", "simulate"])
def test_other_collectives_travel_exactly(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run_command_line([verb, RACKS, "--collective", "allgather", "--wire", "bf16"]) == 2
    expected = "--wire of allgather: 'bf16', expected exact. Leave --wire out: other collectives travel exactly."
    assert expected in capsys.readouterr().err


def test_without_a_size_it_is_25_megabytes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run_command_line(["plan", RACKS, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["bytes"] == 25_000_000


def test_one_rank_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "one.yaml"
    path.write_text("name: one\nnodes:\n  - {name: a, nic: 1Gbit/s, devices: 1}\n")
    assert main.run_command_line(["plan", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["binding"] == "none: all ranks are on node a, so that no link is passed"
    assert found["choices"][0]["fraction_of_bound"] is None
    assert main.run_command_line(["plan", str(path)]) == 0
    assert "the others are predicted to be as fast" in capsys.readouterr().out


def test_many_rows_and_ranks_are_counted_not_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "many.yaml"
    path.write_text("name: many\nnodes:\n  - {name: a, nic: 1Gbit/s, devices: 1, count: 144}\n")
    assert main.run_command_line(["plan", str(path)]) == 0
    out = capsys.readouterr().out
    assert " ... and 128 more" in out
    assert "... and 4 more rows" in out
    assert "... and 4 more columns" in out
    assert len(out.splitlines()) < 45


def test_a_tiny_message_is_decided_by_waiting(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run_command_line(["plan", RACKS, "--bytes", "1kB"]) == 0
    assert "* multi-level waits for 4 messages one after the other" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["plan", "nosuch.yaml"], "nosuch.yaml"),
        (["plan", RACKS, "--bytes", "25Mbit"], "size: '25Mbit', expected a number with one of B, kB, MB"),
        (["plan"], "what to plan: 'neither', expected either CLUSTER or --run RUN_DIR. Give one of the two."),
        (["plan", RACKS, "--run", "x"], "what to plan: 'both', expected either CLUSTER or --run RUN_DIR. Give one of"),
        (
            ["plan", "--run", "nosuch"],
            "--run: 'nosuch', expected a directory with events.jsonl. Name the directory of a run, as",
        ),
        (["plan", "--run", "x", "--rates", "r"], "--rates: 'r', expected a CLUSTER to plan for. Leave it out"),
        (["plan", RACKS, "--rates", "nosuch"], "--rates: 'nosuch', expected a file that can be read. No such file"),
        (
            ["plan", "--run", "x", "--picture", "p.png"],
            "--picture: 'p.png', expected a CLUSTER to draw. Draw the plan of its cluster file: ringweave plan RUN_DIR",
        ),
        (["plan", RACKS, "--picture", "p.gif"], "picture: 'p.gif', expected a file name ending in .png or .svg."),
        (
            ["plan", RACKS, "--picture", "no/p.png"],
            "picture: 'no/p.png', expected a file in a folder that exists. Make",
        ),
    ],
)
def test_wrong_input(argv: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run_command_line([*argv, "--json"]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("ringweave: error: ")
    assert text in captured.err
    assert text in json.loads(captured.out)["error"]


def test_measured_rates_take_the_place_of_the_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rates.json"
    path.write_text('{"links": [{"name": "r1->core", "rate_bytes_per_s": 12.5e6}]}')
    assert (
        main.run_command_line(["plan", RACKS, "--bytes", "1MB", "--rates", str(path), "--simulate", "1", "--json"]) == 0
    )
    found = json.loads(capsys.readouterr().out)
    assert (found["bound_s"], found["measured_rates"]) == (0.08, {"r1->core": 12.5e6})
    assert found["binding"] == "cut: all that leaves b-0, b-1, b-2, b-3 passes r1->core (100Mbit/s)"
    assert found["choices"][0]["simulated_s"] > 0.08
    assert main.run_command_line(["plan", RACKS, "--rates", str(path)]) == 0
    assert f"rates    of 1 of 20 links as measured: {path}" in capsys.readouterr().out.splitlines()


def test_what_is_simulated_decides(capsys: pytest.CaptureFixture[str]) -> None:
    """A slow NIC, 1 MB: measured in the lab ps is 1.10 times as fast as direct, which the formula takes."""
    cluster = "examples/clusters/unequal-nics.yaml"
    assert main.run_command_line(["plan", cluster, "--bytes", "1MB", "--simulate", "0", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["chosen"] == "direct"
    assert main.run_command_line(["plan", cluster, "--bytes", "1MB", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["chosen"] == "ps"
    assert main.run_command_line(["plan", cluster, "--bytes", "1MB", "--simulate", "3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    simulated = {each["schedule"]: each["simulated_s"] for each in found["choices"] if each["simulated_s"]}
    assert found["chosen"] == min(simulated, key=simulated.__getitem__) == "ps"
    assert main.run_command_line(["plan", cluster, "--bytes", "1MB", "--simulate", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    (starred,) = [line for line in lines if line.startswith("* ps  ")]
    assert f"{simulated['ps'] * 1e3:.4g} ms" in starred
    assert "; next is " in lines[-1]
    assert ", simulated to take 1." in lines[-1]
    assert lines[-1].endswith("times as long. By formula it would be direct.")


def test_one_that_is_simulated_alone_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    cluster = "examples/clusters/unequal-nics.yaml"
    assert main.run_command_line(["plan", cluster, "--bytes", "1MB", "--simulate", "1"]) == 0
    assert "; nothing else was simulated." in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.slow
def test_a_picture_has_the_measured_rates(tmp_path: Path) -> None:
    import matplotlib as mpl

    rates, picture = tmp_path / "rates.json", tmp_path / "p.svg"
    rates.write_text('{"links": [{"name": "r1->core", "rate_bytes_per_s": 12.5e6}]}')
    with mpl.rc_context({"svg.fonttype": "none"}):
        assert main.run_command_line(["plan", RACKS, "--rates", str(rates), "--picture", str(picture)]) == 0
    words = picture.read_text()
    assert ">100Mbit/s up, 200Mbit/s down (slowest)<" in words
    assert "b-3 passes r1-&gt;core (100Mbit/s)<" in words


LED = """
name: led
nodes:
- name: a
  nics: [{name: eth0, rate: 10Gbit/s, numa: 0}, {name: ib0, rate: 10Gbit/s, numa: 1, rdma: true}]
  devices: [{kind: cuda, numa: 0}, {kind: cuda, numa: 1}, {kind: cuda, numa: 1}]
- {name: b, nic: 10Gbit/s, devices: 2}
- {name: c, nic: 10Gbit/s, devices: 1}
"""


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        (
            [],
            [
                "leaders  3, one for each node",
                "  a/1: on NUMA node 1, as ib0 is, the first of those that are",
                "  b/3: the first device: no device is known to be nearer to eth0",
                "  c: the only device of its node",
                "matrix   1 x 3",
                "  row 0:  a/1, b/3, c",
                "  column 0:  a/1",
                "  column 1:  b/3",
                "  column 2:  c",
            ],
        ),
        (
            ["--leader-per-nic"],
            [
                "leaders  4, one for each NIC",
                "  a/1: on NUMA node 1, as ib0 is, the first of those that are",
                "  a/0: on NUMA node 0, as eth0 is",
                "  b/3: the first device: no device is known to be nearer to eth0",
            ],
        ),
    ],
    ids=["one a node", "one a NIC"],
)
def test_leaders_have_reasons_and_the_matrix_has_columns(
    more: list[str], expected: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "led.yaml"
    path.write_text(LED)
    assert main.run_command_line(["plan", str(path), *more]) == 0
    lines = capsys.readouterr().out.splitlines()
    first = lines.index(expected[0])
    assert lines[first : first + len(expected)] == expected
    assert main.run_command_line(["plan", str(path), *more, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["leader_reasons"]) == len(found["leaders"])
    assert found["leader_reasons"][0] == expected[1].partition(": ")[2]


class Terminal(io.StringIO):
    """Standard error that somebody looks at."""

    def isatty(self) -> bool:
        return True


def test_who_waits_at_a_terminal_is_told_what_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(echo, "PROGRESS_INTERVAL_S", 0.0)
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert main.run_command_line(["plan", RACKS, "--bytes", "5MB", "--simulate", "1"]) == 0
    lines = sys.stderr.getvalue().splitlines()
    assert any(line.endswith("] planning leader-matrix, layout 1 of 3") for line in lines)
    assert any("] simulating multi-level: " in line and "% done, about" in line for line in lines)


@pytest.mark.slow
def test_the_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.svg"
    assert main.run_command_line(["plan", RACKS, "--picture", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["chosen"] == "leader-matrix"
    assert path.read_bytes().startswith(b"<?xml")


def test_the_best_are_simulated_on_demand(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run_command_line(["plan", RACKS, "--bytes", "1MB", "--simulate", "2", "--json"]) == 0
    choices = json.loads(capsys.readouterr().out)["choices"]
    simulated = [choice["simulated_s"] for choice in choices]
    assert simulated[2:] == [None] * (len(choices) - 2)
    for choice, simulated_s in zip(choices[:2], simulated[:2], strict=True):
        assert 0.9 < simulated_s / choice["predicted_s"] < 1.3  # processors and queues cost something
    assert main.run_command_line(["plan", RACKS, "--bytes", "1MB", "--simulate", "2"]) == 0
    table = capsys.readouterr().out.splitlines()
    assert any(line.split()[:3] == ["schedule", "predicted", "simulated"] for line in table)


def test_rdma_is_said_to_be_there_or_absent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("""
name: pair
nodes:
  - {name: a, nics: [{name: ib0, rate: 100Gbit/s, rdma: true}, {name: eth0, rate: 10Gbit/s}], devices: 1}
  - {name: b, nic: 10Gbit/s, devices: 1}
""")
    assert main.run_command_line(["plan", str(path)]) == 0
    text = "RDMA     on a/ib0: what NCCL runs takes it (RINGWEAVE_DEVICE_PATH); all else goes by TCP"
    assert text in capsys.readouterr().out
    assert main.run_command_line(["plan", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rdma"] == ["a/ib0"]
    path.write_text("name: pair\nnodes: [{name: a, nic: 10Gbit/s, devices: 1, count: 2}]\n")
    assert main.run_command_line(["plan", str(path)]) == 0
    assert "RDMA     absent (no NIC has rdma: true): between nodes all goes by TCP" in capsys.readouterr().out
