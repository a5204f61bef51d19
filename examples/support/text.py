"""The text to learn from: the sources and documentation of the Python that runs this.

Every rank reads the same files in the same order, so nothing has to be downloaded or sent around.
"""

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset

SUFFIXES = {".py", ".txt", ".rst", ".html"}
# Tests and codec tables repeat themselves, topics.py is read as text below, and the rest is not the library's own.
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}
SKIPPED_PREFIX = "_sysconfigdata"
HELD_OUT_ONE_IN = 10
SEPARATOR = b"\n\n"


@dataclass(frozen=True, kw_only=True, slots=True)
class Corpus:
    """Bytes to train on and bytes that training never sees, both one-dimensional uint8 tensors."""

    train: torch.Tensor
    held_out: torch.Tensor


def load_corpus(max_bytes: int, device: torch.device) -> Corpus:
    """Returns at most `max_bytes` of the standard library's text on `device`, one document in ten held out."""
    corpus = split(find_documents(), max_bytes)
    return Corpus(train=corpus.train.to(device), held_out=corpus.held_out.to(device))


def find_documents() -> Iterator[bytes]:
    """Yields the text of every source file, document and help topic of this Python, in no order."""
    for folder, folders, names in os.walk(sysconfig.get_path("stdlib")):
        folders[:] = set(folders) - SKIPPED_FOLDERS
        for path in (Path(folder, name) for name in names):
            if path.suffix in SUFFIXES and not path.name.startswith(SKIPPED_PREFIX):
                yield path.read_bytes()
    try:
        from pydoc_data.topics import topics
    except ImportError:  # some distributions package the help topics apart
        return
    yield from (topic.encode() for topic in topics.values())


def split(documents: Iterator[bytes], max_bytes: int) -> Corpus:
    """Returns whole documents, each on one side only, chosen by the hash of what they contain.

    Identical files have one hash: they are kept once and cannot be on both sides. The hash also orders the
    documents, so that a smaller `max_bytes` is an even sample of the library and not its first letters.
    """
    by_digest = {hashlib.sha256(document).digest(): document for document in documents if document.strip()}
    train, held_out, num_bytes = [], [], 0
    for digest in sorted(by_digest):
        num_bytes += len(by_digest[digest])
        if num_bytes > max_bytes:
            break
        (held_out if digest[-1] % HELD_OUT_ONE_IN == 0 else train).append(by_digest[digest])
    return Corpus(train=_tensor(train), held_out=_tensor(held_out))


@dataclass(frozen=True, kw_only=True, slots=True)
class Batches:
    """The sequences of every train step, as one rank sees them.

    They depend on the seed and the step alone: a run can be resumed anywhere, and however many ranks there are,
    together they train on the same sequences.
    """

    source: torch.Tensor
    """The bytes to draw sequences from."""
    batch: int
    """Sequences in a step, over all ranks."""
    context: int
    """Bytes in a sequence."""
    seed: int
    share: slice
    """Which of a step's sequences are this rank's."""

    def at(self, train_step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns this rank's inputs and targets, (sequences, context) int64."""
        random = np.random.default_rng((self.seed, train_step))
        starts = random.integers(len(self.source) - self.context, size=self.batch)
        return windows(self.source, torch.from_numpy(starts[self.share]), self.context)


class Sequences(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Sequences at random places, each drawn from its number: whoever reads number 7 gets the same one."""

    def __init__(self, source: torch.Tensor, context: int, num_sequences: int) -> None:
        """Cuts them from the bytes of `source`, each with `context` bytes and as many targets."""
        self.source, self.context = source, context
        self.starts = np.random.default_rng(0).integers(len(source) - context, size=num_sequences)

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the inputs and the targets of a sequence, (context,) int64."""
        row = self.source[self.starts[index] : self.starts[index] + self.context + 1].long()
        return row[:-1], row[1:]


def held_out_windows(corpus: Corpus, *, num_windows: int, context: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns inputs and targets spread evenly over the held-out bytes, (num_windows, context) int64.

    No byte is a target twice, so `num_windows * context` held-out bytes are judged.
    """
    num_windows = min(num_windows, (len(corpus.held_out) - 1) // context)
    starts = torch.arange(num_windows) * (len(corpus.held_out) - 1) // num_windows
    return windows(corpus.held_out, starts, context)


def windows(source: torch.Tensor, starts: torch.Tensor, context: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the `context` bytes from each start, and the byte that follows each of them."""
    positions = starts[:, None] + torch.arange(context + 1)
    rows = source[positions.to(source.device)].long()
    return rows[:, :-1], rows[:, 1:]


def _tensor(documents: list[bytes]) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(SEPARATOR.join(documents), dtype=np.uint8).copy())
