"""The file that says what a checkpoint of a pipeline is made of."""

from pathlib import Path

import pytest

from ringweave.errors import TrainingError
from ringweave.pipeline import checkpoints


@pytest.mark.parametrize("content", [b"", b"null", b"[1]", b"{", b"\xff\xfe", b"[" * 100_000, b"{}"])
def test_what_is_no_file_of_ours_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / checkpoints.SHARED_FILE).write_bytes(content)
    with pytest.raises(TrainingError, match=r"^(format of the )?checkpoint: .*, expected (a file pipeline.json|\d)"):
        checkpoints._read_shared(tmp_path)
