"""What a job's processes keep from others, for tests to look for in what the run has left."""

import json
from collections.abc import Collection
from pathlib import Path

TELLS = """
import os, pathlib
from ringweave.rpc import Credentials
own = os.environ["RINGWEAVE_CREDENTIALS"]
pathlib.Path("secrets").mkdir(exist_ok=True)
name = os.environ.get("RINGWEAVE_MEMBER") or os.environ["RANK"]
Credentials.from_descriptor(os.dup(int(own.removeprefix("fd:")))).save(pathlib.Path("secrets", name))
"""
"""Before a script: each worker leaves what it was given in a folder outside the run's."""


def check_none(run_dir: Path, secrets: Path, *, num_told: int, names: Collection[str]) -> None:
    """Nothing that so many processes told is in any file of the run, of which some are named, and none is for all to
    write."""
    told = [json.loads(path.read_text()) for path in secrets.iterdir()]
    assert len(told) >= num_told
    keys = [line for each in told for line in each["key_pem"].splitlines() if line and "-----" not in line]
    hidden = {each["token"] for each in told} | set(keys)
    assert len(hidden) > num_told
    files = [path for path in run_dir.rglob("*") if path.is_file()]
    assert set(names) <= {path.name for path in files}
    for path in files:
        content = path.read_text(errors="replace")
        assert "PRIVATE KEY" not in content
        assert not [secret for secret in hidden if secret in content], path
        assert path.stat().st_mode & 0o022 == 0, path
