"""What every picture needs: matplotlib where it is installed, a format that it knows, a file that is written."""

import importlib.util
from pathlib import Path
from typing import Any

from ringweave.errors import UsageError, explain
from ringweave.files import writing

SUFFIXES = (".png", ".svg")


def check_library() -> None:
    """Refuse before anything is computed what could not be drawn afterwards.

    Raises:
        UsageError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        do = "Install it: pip install matplotlib"
        raise UsageError(explain("picture", got="no matplotlib", expected="matplotlib to draw it", do=do))


def check_path(text: str) -> Path:
    """The path of a picture that can be drawn and written.

    Raises:
        UsageError: matplotlib is not installed, the name ends in another format, or the file cannot be written.
    """
    check_library()
    path = Path(text)
    if path.suffix.lower() not in SUFFIXES:
        expected = f"a file name ending in {' or '.join(SUFFIXES)}"
        raise UsageError(explain("picture", got=text, expected=expected, do="Name it so"))
    if not path.parent.is_dir():
        expected = "a file in a folder that exists"
        raise UsageError(explain("picture", got=text, expected=expected, do="Make the folder first"))
    writing.check("picture", path)
    return path


def new_figure(width: float, height: float, **options: Any) -> tuple[Any, Any]:
    """A figure of that many inches and its axes, drawn without a screen.

    Options are those of matplotlib's `Figure.subplots`. It belongs to no window and needs not be closed.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(**options)


def save(figure: Any, path: Path) -> None:
    """Write a figure; its format is that of the file's name. The same figure gives the same bytes every time.

    Raises:
        UsageError: It cannot be written.
    """
    import matplotlib as mpl

    metadata = {"Date": None} if path.suffix.lower() == ".svg" else {"Software": None}
    with mpl.rc_context({"svg.hashsalt": "ringweave"}), writing.refusing("picture", path):
        figure.savefig(path, dpi=150, metadata=metadata)
