"""The soak of bench/, for a few seconds: random collectives on random groups of real processes, every value checked."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

BENCH = Path(__file__).parents[2] / "bench"


def test_a_short_soak_finds_nothing(tmp_path: Path) -> None:
    command = [str(Path(sys.executable).with_name("ringweave")), "run", "--workers", "2,1", str(BENCH / "soak.py")]
    options = ["--minutes", "0.05", "--seed", "5", "--max-bytes", "2000000"]
    ended = subprocess.run([*command, *options], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    line = next(line for line in ended.stdout.splitlines() if '"kind"' in line)
    summary = json.loads(line[line.index("{") :])
    assert summary["collectives"] > 0
    assert summary["by_schedule"]


def test_the_soak_sees_one_wrong_element(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    import soak_values

    setting = {"seed": 1, "number": 2, "ranks": (0, 1), "num_elements": 40_000, "factor": 0.5}
    for dtype_name, operation in (("float32", "sum"), ("uint64", "max"), ("float16", "avg"), ("bool", "bxor")):
        case = soak_values.Case(dtype_name=dtype_name, operation=operation, **setting)
        expected, _ = soak_values._expected(case)
        result = soak_values._repeated(expected, 40_000)
        result = result.view(torch.uint64) if dtype_name == "uint64" else result.to(case.dtype)
        assert soak_values.find_wrong(case, result) == ""
        last_byte = 35_000 * case.dtype.itemsize + case.dtype.itemsize - 1
        result.view(torch.uint8)[last_byte] ^= 1 if dtype_name == "bool" else 0x30
        assert soak_values.find_wrong(case, result).startswith("element 35000 is ")


def test_the_soak_counts_shared_memory_as_it_is_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    import soak

    maps = """\
7f0000000000-7f0000200000 rw-s 00000000 00:01 7  /memfd:ringweave (deleted)
7f0001000000-7f0001001000 rw-s 00000000 00:02 8  /dev/shm/torch 1
7f0002000000-7f0002400000 rw-p 00000000 00:00 0
7f0003000000-7f0003001000 r--s 00000000 08:01 9  /usr/lib/gconv/gconv-modules.cache
"""
    assert soak._shared_bytes(maps) == 0x200000 + 0x1000
