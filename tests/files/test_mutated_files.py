"""Cluster files and job files with anything in them: read, or refused on one screen; never a crash."""

import random
from pathlib import Path

import pytest

from ringweave import topology
from ringweave.errors import UsageError
from ringweave.jobs import request
from tests.rpc.mutations import mutated

EXAMPLES = Path(__file__).parents[2] / "examples" / "clusters"
JOB = """
name: text
gpus: 15
script: train.py
arguments: [--epochs, "3"]
environment: {SEED: "1"}
nodes:
  - {name: big, capacity: 10, max_retries: 5, deletion: keep-on-failure}
  - {name: small, capacity: 5}
"""
BOMBS = [
    "[" * 5_000,
    "{a: " * 5_000,
    "&a [*a]",
    "a: &a [x,x,x,x,x,x,x,x,x]\n"
    + "".join(f"{b}: &{b} [{','.join(['*' + a] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)),
    "nodes: !!python/object/apply:os.system ['true']",
    "name: x\nnodes: [{name: a, count: 99999999999999999999, nic: 1bit/s, devices: 1}]",
    "\x00",
    "name: " + "9" * 100_000,
]
READERS = {"cluster": topology.loads, "job": request.parse_request}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", READERS)
def test_mutated_files_are_read_or_refused(kind: str, tmp_path: Path) -> None:
    good = (EXAMPLES / "two-racks.yaml").read_bytes() if kind == "cluster" else JOB.encode()
    rng, load, path = (
        random.Random(13),
        topology.load if kind == "cluster" else request.load_request,
        tmp_path / "file.yaml",
    )
    refusals = []
    for _ in range(150):
        path.write_bytes(mutated(rng, good))
        try:
            load(path)
        except UsageError as error:
            refusals.append(str(error))
    assert len(refusals) > 50
    assert max(map(len, refusals)) < 5000


@pytest.mark.parametrize("kind", READERS)
@pytest.mark.parametrize("bomb", BOMBS, ids=lambda bomb: bomb[:12].strip())
def test_bombs_are_refused_on_one_screen(kind: str, bomb: str) -> None:
    with pytest.raises(UsageError, match=r".") as found:
        READERS[kind](bomb)
    assert len(str(found.value)) < 5000
