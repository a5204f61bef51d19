from dataclasses import dataclass
from pathlib import Path

import pytest

from ringweave.environment import WorkerEnvironment
from ringweave.errors import UsageError
from ringweave.jobs.worker_options import BLOCK_ORDER, RankOrder
from ringweave.launcher.workers import (
    HostPort,
    WorkerProgram,
    build_worker_group,
    check_program,
    is_python_script,
    parse_worker_counts,
)


@dataclass(frozen=True)
class Node:
    name: str
    devices: tuple[int, ...]


def laid_out(*counts: int, num_cpus: int = 8, order: RankOrder = BLOCK_ORDER):
    nodes = [Node(f"a{index}", (0,) * count) for index, count in enumerate(counts)]
    told = {"schedule": "ring", "tuning": False, "mode": "sync"}
    common = WorkerEnvironment(cluster_path=Path("/c.yaml"), run_dir=Path("/r"), **told)
    return build_worker_group(
        nodes, ("python", "x.py"), HostPort(host="h", port=5), num_cpus=num_cpus, common_environment=common, order=order
    )


def test_ranks_count_through_the_nodes() -> None:
    group = laid_out(3, 2)
    assert group.world_size == 5
    assert [(w.global_rank, w.node, w.local_rank) for w in group.workers] == [
        (0, "a0", 0),
        (1, "a0", 1),
        (2, "a0", 2),
        (3, "a1", 0),
        (4, "a1", 1),
    ]


def test_ranks_in_another_order_keep_node_and_local_rank() -> None:
    group = laid_out(2, 1, order=RankOrder(kind="round-robin"))
    told = [(w.node, w.local_rank, w.environ["LOCAL_RANK"], w.environ["GROUP_RANK"]) for w in group.workers]
    assert told == [("a0", 0, "0", "0"), ("a1", 0, "0", "1"), ("a0", 1, "1", "0")]


def test_a_worker_is_told_all_it_needs() -> None:
    assert laid_out(3, 2).workers[4].environ == {
        "RANK": "4",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "5",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "1",
        "NODE_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
        "MASTER_ADDR": "h",
        "MASTER_PORT": "5",
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        "MALLOC_TRIM_THRESHOLD_": "1073741824",
        "MALLOC_MMAP_THRESHOLD_": "268435456",
        "RES_OPTIONS": "timeout:1 attempts:3",
        "RINGWEAVE_CLUSTER": "/c.yaml",
        "RINGWEAVE_NODE": "a1",
        "RINGWEAVE_RUN_DIR": "/r",
        "RINGWEAVE_SCHEDULE": "ring",
        "RINGWEAVE_TUNING": "0",
        "RINGWEAVE_MODE": "sync",
    }


@pytest.mark.parametrize(("num_cpus", "threads"), [(1, "1"), (9, "1"), (10, "2"), (64, "12")])
def test_cpus_are_shared_among_the_workers(num_cpus: int, threads: str) -> None:
    assert laid_out(3, 2, num_cpus=num_cpus).workers[0].environ["OMP_NUM_THREADS"] == threads


@pytest.mark.parametrize(("text", "counts"), [("4", [4]), ("3,2", [3, 2]), (" 1 , 1,1", [1, 1, 1])])
def test_counts(text: str, counts: list[int]) -> None:
    assert parse_worker_counts(text) == counts


@pytest.mark.parametrize("text", ["", "0", "-1", "two", "3,", "3,0", "1.5", "3 2", "3;2", "²", "٣"])
def test_wrong_counts_say_what_is_expected(text: str) -> None:
    expected = r"--workers: .*, expected one positive whole number per node, separated by commas\. Write 4 for four"
    with pytest.raises(UsageError, match=expected):
        parse_worker_counts(text)


def test_command_lines() -> None:
    assert WorkerProgram(target="x.py", arguments=("-m", "1")).argv("py") == ("py", "x.py", "-m", "1")
    assert WorkerProgram(target="a.b", is_module=True).argv("py") == ("py", "-m", "a.b")
    assert WorkerProgram(target="ls", arguments=("-l",), is_command=True).argv("py") == ("ls", "-l")


@pytest.mark.parametrize(
    ("content", "mode", "expected"),
    [
        (b"print(1)\n", 0o644, True),
        (b"print(1)\n", 0o755, True),
        (b"#!/usr/bin/env python3\nprint(1)\n", 0o755, True),
        (b"#!/bin/sh\necho 1\n", 0o755, False),
        (b"\x7fELF\x02", 0o755, False),
    ],
)
def test_which_files_the_interpreter_is_given(content: bytes, mode: int, expected: bool, tmp_path: Path) -> None:
    path = tmp_path / "train"
    path.write_bytes(content)
    path.chmod(mode)
    assert is_python_script(str(path)) == expected


def test_words_that_are_no_files_are_python_by_their_suffix_only() -> None:
    assert [is_python_script(word) for word in ("nosuch.py", "nosuch", "ls")] == [True, False, False]


def test_a_missing_command_is_refused(tmp_path: Path) -> None:
    check_program(WorkerProgram(target="ls", is_command=True))
    with pytest.raises(UsageError, match=r"command: 'nosuch', expected a program on the PATH, or the path of one\."):
        check_program(WorkerProgram(target="nosuch", is_command=True))
    (tmp_path / "plain").touch()
    with pytest.raises(UsageError, match=r"expected a program that can be run\. Make it executable: chmod \+x\."):
        check_program(WorkerProgram(target=str(tmp_path / "plain"), is_command=True))


def test_a_missing_script_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"script: '.*', expected the path of a Python file\. Check the path, or put -m"
    ):
        check_program(WorkerProgram(target=str(tmp_path)))


@pytest.mark.parametrize("name", ["nosuch", "nosuch.train", "", "../x", "__main__"])
def test_a_missing_module_is_refused(name: str) -> None:
    with pytest.raises(
        UsageError, match=r"module: '.*', expected a module that `python -m` finds from this directory\."
    ):
        check_program(WorkerProgram(target=name, is_module=True))


def test_modules_are_found_here_and_in_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "trainer.py").touch()
    monkeypatch.chdir(tmp_path)
    for name in ("trainer", "json.tool", "this"):
        check_program(WorkerProgram(target=name, is_module=True))
