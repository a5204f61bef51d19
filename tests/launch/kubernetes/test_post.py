"""What a container says last is what the kubelet can read."""

from pathlib import Path

import pytest

from ringweave.jobs.life.observing import Cause, Phase
from ringweave.launch.groups import posts
from ringweave.launch.groups.posts import Report
from ringweave.launch.kubernetes import post
from ringweave.launch.kubernetes.post import MAX_LAST_WORDS, Desk, DeskPost


@pytest.mark.parametrize("text", ["short", "x" * MAX_LAST_WORDS, "é→\n\x00" * 5000, "\\" * 3000])
def test_last_words_are_whole(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(post, "LAST_S", 0.0)
    told = Report(round=3, phase=Phase.FAILED, pid=7, cause=Cause.PLACE, text=text, ended_s=5.0, last_loss=0.5)
    path = tmp_path / "last-words"
    DeskPost(Desk(url="http://127.0.0.1:9", group="a/b/0/1", token=str), path).tell(told)
    content = path.read_bytes()
    assert len(content) <= MAX_LAST_WORDS
    found = posts.parse_report(content)
    assert (found.round, found.phase, found.cause, found.ended_s, found.last_loss) == (
        *(3, Phase.FAILED, Cause.PLACE),
        *(5.0, 0.5),
    )
    if text == "short":
        assert found.text == text
    else:
        assert text.startswith(found.text.removesuffix("..."))
        assert len(content) > MAX_LAST_WORDS - 10, "no more is cut than must be"


def test_what_is_known_of_many_members_does_not_cost_the_last_words() -> None:
    many = tuple(f"{rank}.0" for rank in range(2000))
    said = Report(round=1, phase=Phase.SUCCEEDED, pid=7, text="all is well", epoch=(1, 2), members=many[:63], out=many)
    heard = posts.parse_report(post.last_words(said))
    assert (heard.phase, heard.text, heard.out) == (Phase.SUCCEEDED, "all is well", ())
    few = Report(round=1, phase=Phase.SUCCEEDED, pid=7, epoch=(1, 2), members=many[:3], out=many[3:6])
    assert posts.parse_report(post.last_words(few)) == few
