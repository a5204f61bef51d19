from pathlib import Path

import pytest

from ringweave.errors import UsageError
from ringweave.plots import figures


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    figures.check_matplotlib()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    expected = r"picture: 'no matplotlib', expected matplotlib to draw it\. Install it: pip install matplotlib\."
    with pytest.raises(UsageError, match=expected):
        figures.check_matplotlib()
    with pytest.raises(UsageError, match=expected):
        figures.check_picture_path("x.png")


@pytest.mark.parametrize("name", ["a.png", "a.SVG"])
def test_paths(name: str, tmp_path: Path) -> None:
    assert figures.check_picture_path(str(tmp_path / name)) == tmp_path / name


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("a.gif", "picture: 'a.gif', expected a file name ending in .png or .svg. Name it so."),
        ("no/a.png", "picture: 'no/a.png', expected a file in a folder that exists. Make the folder first."),
    ],
)
def test_other_paths(path: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError) as caught:
        figures.check_picture_path(path)
    assert str(caught.value) == text


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a.png", "a.svg"])
def test_the_same_figure_is_the_same_file(name: str, tmp_path: Path) -> None:
    contents = []
    for _ in range(2):
        figure, axis = figures.new_figure(2, 2)
        axis.plot([0, 1], [0, 1])
        figures.save_figure(figure, tmp_path / name)
        contents.append((tmp_path / name).read_bytes())
    assert contents[0] == contents[1]
