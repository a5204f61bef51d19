"""The two models of the first example, checked against values worked out by hand."""

import math

import pytest
import torch

from support import bigram, gpt

TINY = gpt.GPTConfig(layers=2, width=16, heads=2, context=12)


def test_bigram_counts_pairs_and_smooths_them():
    train = torch.tensor(list(b"ababac"), dtype=torch.uint8)
    model = bigram.fit(train, add_k=0.5)
    a, b, c = b"abc"
    assert model[a, b].exp().item() == pytest.approx(2.5 / (3 + 128))
    assert model[a, c].exp().item() == pytest.approx(1.5 / (3 + 128))
    assert model[b, a].exp().item() == pytest.approx(2.5 / (2 + 128))
    assert model[c, a].exp().item() == pytest.approx(1 / 256)
    assert model.exp().sum(dim=1).tolist() == pytest.approx([1.0] * 256)


def test_bigram_loss_is_the_mean_over_all_targets():
    model = bigram.fit(torch.tensor(list(b"ababac"), dtype=torch.uint8), add_k=0.5)
    inputs, targets = torch.tensor([list(b"ac")]), torch.tensor([list(b"ba")])
    expected = -(math.log(2.5 / 131) + math.log(1 / 256)) / 2
    assert bigram.nats_per_byte(model, inputs, targets) == pytest.approx(expected)


def test_an_untrained_gpt_guesses_evenly():
    torch.manual_seed(0)
    inputs = torch.randint(256, (2, 12))
    assert gpt.GPT(TINY)(inputs, inputs).item() == pytest.approx(math.log(256), abs=0.05)


def test_gpt_cannot_see_what_comes_later():
    torch.manual_seed(0)
    model = gpt.GPT(TINY)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    inputs = torch.randint(256, (1, 12))
    changed = inputs.clone()
    changed[0, 8:] = (changed[0, 8:] + 1) % 256
    before, after = model.logits(inputs), model.logits(changed)
    torch.testing.assert_close(before[:, :8], after[:, :8])
    assert not torch.allclose(before[:, 8:], after[:, 8:])


def test_generated_text_starts_with_the_prompt_and_repeats_with_the_seed():
    torch.manual_seed(0)
    model = gpt.GPT(TINY)
    first, again, other = (
        gpt.generate(model, b"import", num_bytes=20, temperature=0.8, seed=seed) for seed in (1, 1, 2)
    )
    assert first == again != other
    assert first.startswith(b"import")
    assert len(first) == 26
