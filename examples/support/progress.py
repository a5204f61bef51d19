"""A progress bar for terminals, logs and pipes."""

import sys

from tqdm import tqdm

BAR = "{desc} {percentage:3.0f}%|{bar:20}| {n_fmt}/{total_fmt} samples, {rate_fmt}, {remaining} to go{postfix}"


def progress_bar(*, total: int, initial: int = 0, hidden: bool = False) -> tqdm:
    """Returns a bar that counts samples: one that moves on a terminal, a line every few seconds elsewhere."""
    terminal = sys.stderr.isatty()
    return tqdm(
        desc="training",
        total=total,
        initial=initial,
        disable=hidden,
        unit=" samples",
        bar_format=BAR,
        file=sys.stderr if terminal else _OneLineEach(),
        mininterval=0.2 if terminal else 5.0,
    )


class _OneLineEach:
    """A text stream for logs and pipes: what would redraw a line ends it instead."""

    def write(self, text: str) -> None:
        line = text.strip("\r\n ")
        if line:
            print(line, file=sys.stderr, flush=True)

    def flush(self) -> None:
        """Has nothing to do: every line is flushed when it is written."""
