"""Shared parts of all plots: checks for matplotlib and the file format, new figures, reproducible saving."""

import importlib.util
from pathlib import Path
from typing import Any

from ringweave.errors import UsageError
from ringweave.files import file_io

PICTURE_SUFFIXES = (".png", ".svg")

SYSTEM_COLOURS = {
    "ringweave": "#d1495b",
    "balanced": "#d1495b",  # ringweave's synchronous mode
    "gloo": "#30638e",
    "openmpi": "#5f9e6e",
    "mpich": "#c8a13a",
    "ps-hra": "#7d5ba6",
    "ps": "#7f8c9d",
    "ring": "#3d7068",
    "hierarchical": "#e08e45",
}
"""Colours of systems, modes and architectures, the same in all pictures."""
PART_COLOURS = {
    "compute": "#6b7681",
    "input": "#8e6bbf",
    "update": "#4f9ac4",
    "script": "#c08a5a",
    "wait": "#e3b23c",
    "communication": "#74b083",
}
"""Colours of the parts of a train step, as on the page of a run."""
DEVICE_COLOURS = ("#4f7cac", "#c97b84", "#86a873", "#d9b44a", "#9b7fb8", "#8d99ae", "#dd9a62", "#5f8f8b")
"""Colours of devices, which are no systems; again from the first for more."""
TINTS = ("#dbe7f3", "#f6e3cf", "#dfeedd", "#eadff0", "#f6dede", "#e4e4e4", "#d8eeee", "#f3efcf")
"""Backgrounds."""
ALARM, DARK, GREY, LIGHT, PALE = "#b3263a", "#1d2329", "#5b6770", "#dddddd", "#f5f5f5"
"""What binds or is a bound; texts and measurements; lines; grids; backgrounds."""


def check_matplotlib() -> None:
    """Refuse before the computation if plots cannot be drawn afterwards.

    Raises:
        UsageError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        do = "Install it: pip install matplotlib"
        raise UsageError("picture", got="no matplotlib", expected="matplotlib to draw it", do=do)


def check_picture_path(text: str) -> Path:
    """Return the path of a plot, after checking that it can be drawn and written.

    Raises:
        UsageError: matplotlib is not installed, the name has another format's ending, or the file cannot be written.
    """
    check_matplotlib()
    path = Path(text)
    if path.suffix.lower() not in PICTURE_SUFFIXES:
        expected = f"a file name ending in {' or '.join(PICTURE_SUFFIXES)}"
        raise UsageError("picture", got=text, expected=expected, do="Name it so")
    if not path.parent.is_dir():
        expected = "a file in a folder that exists"
        raise UsageError("picture", got=text, expected=expected, do="Make the folder first")
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
