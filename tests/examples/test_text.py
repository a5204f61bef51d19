"""Training must never see a held-out byte, and the ranks together must see what one rank alone would."""

import pytest
import torch

from support import processes, text

DOCUMENTS = [f"document {number}: {'x' * number}\n".encode() for number in range(200)]


def test_a_document_is_whole_and_on_one_side_only():
    corpus = text.split(iter(DOCUMENTS), max_bytes=1_000_000)
    sides = [bytes(side.tolist()).split(text.SEPARATOR) for side in (corpus.train, corpus.held_out)]
    found = [{line.strip() for line in side if line.strip()} for side in sides]
    assert not found[0] & found[1]
    assert found[0] | found[1] == {document.strip() for document in DOCUMENTS}
    assert 5 <= len(found[1]) <= 40


def test_copies_are_kept_once_and_cannot_leak():
    once, thrice = text.split(iter(DOCUMENTS), 1_000_000), text.split(iter(DOCUMENTS * 3), 1_000_000)
    assert torch.equal(once.train, thrice.train)
    assert torch.equal(once.held_out, thrice.held_out)


def test_the_side_does_not_depend_on_order_or_on_other_documents():
    held_out = text.split(iter(DOCUMENTS), 1_000_000).held_out
    assert torch.equal(text.split(reversed(DOCUMENTS), 1_000_000).held_out, held_out)
    fewer = text.split(iter(DOCUMENTS), 5_000)
    assert bytes(held_out.tolist()).startswith(bytes(fewer.held_out.tolist()))
    assert len(fewer.train) + len(fewer.held_out) <= 5_000 + len(DOCUMENTS) * len(text.SEPARATOR)


@pytest.mark.parametrize("world_size", [1, 2, 4, 5, 8])
def test_the_ranks_together_train_on_the_same_sequences_whatever_the_world_size(world_size):
    source = torch.arange(10_000).remainder(251).to(torch.uint8)

    def batch(global_rank: int, world_size: int) -> torch.Tensor:
        share = processes.share_of(40, global_rank, world_size)
        return text.Batches(source=source, batch=40, context=16, seed=7, share=share).at(3)[0]

    together = torch.cat([batch(global_rank, world_size) for global_rank in range(world_size)])
    assert torch.equal(together, batch(0, 1))


def test_batches_change_with_the_step_and_with_the_seed():
    source = torch.arange(10_000).remainder(251).to(torch.uint8)
    first, second = (text.Batches(source=source, batch=8, context=16, seed=seed, share=slice(None)) for seed in (0, 1))
    assert torch.equal(first.at(5)[0], first.at(5)[0])
    assert not torch.equal(first.at(5)[0], first.at(6)[0])
    assert not torch.equal(first.at(5)[0], second.at(5)[0])


def test_a_sequence_is_the_same_whoever_reads_it():
    source = torch.arange(10_000).remainder(251).to(torch.uint8)
    first, second = (text.Sequences(source, context=8, num_sequences=5) for _ in range(2))
    assert len(first) == 5
    for number in range(5):
        inputs, targets = first[number]
        assert torch.equal(inputs[1:], targets[:-1])
        assert torch.equal(inputs, second[number][0])
    assert not torch.equal(first[0][0], first[1][0])


def test_targets_are_the_bytes_that_follow():
    inputs, targets = text.windows(torch.arange(20, dtype=torch.uint8), torch.tensor([0, 7]), context=4)
    assert inputs.tolist() == [[0, 1, 2, 3], [7, 8, 9, 10]]
    assert targets.tolist() == [[1, 2, 3, 4], [8, 9, 10, 11]]


@pytest.mark.parametrize("num_bytes", [101, 105, 250, 251])
def test_no_held_out_byte_is_judged_twice(num_bytes):
    source = torch.arange(num_bytes, dtype=torch.uint8)
    corpus = text.Corpus(train=source, held_out=source)
    _, targets = text.held_out_windows(corpus, num_windows=10, context=10)
    assert targets.shape == (10, 10)
    assert len(targets.unique()) == targets.numel()


def test_a_batch_that_ranks_cannot_share_evenly_is_refused():
    with pytest.raises(ValueError, match=r"batch is 40, expected a multiple of the world size 3\. Choose --batch 39"):
        processes.share_of(40, 0, 3)
