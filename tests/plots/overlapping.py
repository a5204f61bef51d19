"""Texts of a figure that lie on each other."""

import itertools
from typing import Any


def overlaps(figure: Any) -> list[tuple[str, str]]:
    """Return pairs of texts of a figure that lie on each other by more than a pixel."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.text import Text

    FigureCanvasAgg(figure).draw()
    texts = [text for text in figure.findobj(Text) if text.get_visible() and text.get_text().strip()]
    boxes = [(text.get_text(), _box(text.get_text(), Text.get_window_extent(text))) for text in texts]  # without arrows
    inside = [(name, box.padded(-1)) for name, box in boxes if box.width > 2 and box.height > 2]
    return [(a, b) for (a, first), (b, second) in itertools.combinations(inside, 2) if first.overlaps(second)]


def _box(text: str, box: Any) -> Any:
    """Return the box of a text without the empty lines at its end, which only keep others away."""
    from matplotlib.transforms import Bbox

    num_lines = text.count("\n") + 1
    empty = num_lines - text.rstrip("\n").count("\n") - 1
    return Bbox.from_extents(box.x0, box.y0 + box.height * empty / num_lines, box.x1, box.y1)
