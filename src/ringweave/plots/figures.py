"""Shared parts of all plots: checks for matplotlib and the file format, new figures, reproducible saving."""

import importlib.util
from pathlib import Path
from typing import Any

from ringweave.errors import UsageError, explain
from ringweave.files import file_io

PICTURE_SUFFIXES = (".png", ".svg")


def check_matplotlib() -> None:
    """Refuse before the computation if plots cannot be drawn afterwards.

    Raises:
        UsageError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        do = "Install it: pip install matplotlib"
        raise UsageError(explain("picture", got="no matplotlib", expected="matplotlib to draw it", do=do))


def check_picture_path(text: str) -> Path:
    """Return the path of a plot, after checking that it can be drawn and written.

    Raises:
        UsageError: matplotlib is not installed, the name has another format's ending, or the file cannot be written.
    """
    check_matplotlib()
    path = Path(text)
    if path.suffix.lower() not in PICTURE_SUFFIXES:
        expected = f"a file name ending in {' or '.join(PICTURE_SUFFIXES)}"
        raise UsageError(explain("picture", got=text, expected=expected, do="Name it so"))
    if not path.parent.is_dir():
        expected = "a file in a folder that exists"
        raise UsageError(explain("picture", got=text, expected=expected, do="Make the folder first"))
    file_io.check_writable("picture", path)
    return path


def new_figure(width: float, height: float, **options: Any) -> tuple[Any, Any]:
    """Return a figure of this size in inches and its axes, drawn without a screen.

    Options are those of matplotlib's `Figure.subplots`. The figure belongs to no window and needs no closing.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(**options)


def save_figure(figure: Any, path: Path) -> None:
    """Write a figure in the format of the file's name. The same figure gives the same bytes every time.

    Raises:
        UsageError: The file cannot be written.
    """
    import matplotlib as mpl

    metadata = {"Date": None} if path.suffix.lower() == ".svg" else {"Software": None}
    with mpl.rc_context({"svg.hashsalt": "ringweave"}), file_io.report_write_errors("picture", path):
        figure.savefig(path, dpi=150, metadata=metadata)
