import subprocess
from pathlib import Path

from ringweave_bench import machine_description


def test_what_a_number_was_measured_on() -> None:
    found = machine_description.describe_machine()
    assert found["machine"]["num_cpus"] >= 1
    assert found["machine"]["memory_bytes"] > 2**28
    assert found["date"].endswith("+00:00")
    assert found["versions"]["ringweave"]


def test_cpu_models() -> None:
    assert machine_description._cpu_model("processor: 0\nmodel name\t: Fast CPU @ 3 GHz\n") == "Fast CPU @ 3 GHz"
    assert machine_description._cpu_model("")


def test_the_commit_says_whether_files_differ(tmp_path: Path) -> None:
    assert machine_description._git_commit(tmp_path) is None
    git = ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x@y"]
    result = tmp_path / "bench" / "results" / "a.json"
    code = tmp_path / "bench" / "a.py"
    result.parent.mkdir(parents=True)
    for path in (result, code):
        path.write_text("1")
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "m", "--no-verify"]):
        subprocess.run([*git, *command], check=True)
    clean = machine_description._git_commit(tmp_path)
    assert clean is not None
    assert len(clean) == 12
    result.write_text("2")
    result.with_stem("b").write_text("1")
    assert machine_description._git_commit(tmp_path) == clean, "a bench has written its results"
    assert machine_description._git_commit(code.parent) == clean
    code.write_text("2")
    assert machine_description._git_commit(tmp_path) == f"{clean}-dirty"
    assert machine_description._git_commit(result.parent) == f"{clean}-dirty", "wherever in the checkout it is asked"
