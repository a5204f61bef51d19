"""Models as blocks: one after the other they compute what the model computes, and nothing is left out."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ringweave.errors import TrainingError, UsageError
from ringweave.pipeline import blocks, model_blocks
from ringweave.pipeline.runtime import boundaries
from ringweave.pipeline.runtime.boundaries import as_tuple

VOCABULARY, LENGTH = 50, 12
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 32,
    "tie_word_embeddings": False,
}


def bert(transformers: Any) -> nn.Module:
    return transformers.BertForMaskedLM(transformers.BertConfig(**SMALL))


def bert_without_head(transformers: Any) -> nn.Module:
    return transformers.BertModel(transformers.BertConfig(**SMALL), add_pooling_layer=False)


def roberta(transformers: Any) -> nn.Module:
    return transformers.RobertaForMaskedLM(transformers.RobertaConfig(**SMALL))


def gpt2(transformers: Any) -> nn.Module:
    sizes = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 32}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, tie_word_embeddings=False))


def llama(transformers: Any) -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, num_key_value_heads=2))


def qwen2(transformers: Any) -> nn.Module:
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SMALL, num_key_value_heads=2))


def qwen3(transformers: Any) -> nn.Module:
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SMALL, num_key_value_heads=2, head_dim=8))


FAMILIES = [bert, bert_without_head, roberta, gpt2, llama, qwen2, qwen3]


@pytest.fixture(scope="module")
def library() -> Any:
    return pytest.importorskip("transformers", reason="the extra hf is not installed")


def through(parts: list[nn.Module], inputs: Tensor, **side: Tensor) -> Tensor:
    values: tuple[Tensor, ...] = (inputs,)
    for part in parts:
        values = as_tuple(part(*values, **boundaries.select_side_inputs(part, side)))
    return values[0]


def tokens() -> tuple[Tensor, Tensor]:
    ids = torch.randint(3, VOCABULARY, (4, LENGTH), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, 8:] = mask[3, 5:] = 0
    return ids, mask


@pytest.mark.slow
@pytest.mark.parametrize("make", FAMILIES, ids=lambda make: make.__name__)
def test_blocks_of_a_family_compute_what_its_model_computes(make: Callable[[Any], nn.Module], library: Any) -> None:
    torch.manual_seed(0)
    model = make(library).eval()
    ids, mask = tokens()
    with torch.no_grad():
        expected, masked = model(ids)[0], model(ids, attention_mask=mask)[0]
        parts = blocks(model)
        assert torch.equal(through(parts, ids), expected)
        assert torch.equal(through(parts, ids, attention_mask=mask)[mask == 1], masked[mask == 1])
    assert len(parts) == 3 + (1 if make is bert_without_head else 2)


@pytest.mark.slow
@pytest.mark.parametrize("make", FAMILIES, ids=lambda make: make.__name__)
def test_blocks_of_a_family_are_followed_without_data(make: Callable[[Any], nn.Module], library: Any) -> None:
    ids, mask = tokens()
    parts = blocks(make(library))
    for side in ({}, {"attention_mask": mask}):
        crossing = boundaries.trace_boundaries(parts, (ids,), side)
        assert [form.shape for boundary in crossing[1:-1] for form in boundary.tensors] == [(4, LENGTH, 32)] * (
            len(parts) - 1
        )
        assert crossing[1].backward_bytes == crossing[1].forward_bytes == 4 * LENGTH * 32 * 4
        assert crossing[0].backward_bytes == 0


@pytest.mark.slow
def test_tied_weights_are_refused_or_untied(library: Any) -> None:
    model = library.BertForMaskedLM(library.BertConfig(**{**SMALL, "tie_word_embeddings": True}))
    with pytest.raises(TrainingError) as caught:
        blocks(model)
    assert str(caught.value) == (
        "predictions.decoder.weight of block 4: 'embeddings.word_embeddings.weight of block 0', "
        "expected a tensor of the block's own, since blocks may lie on different ranks. "
        "Build the model without tied weights (tie_word_embeddings=False), or take blocks(model, tied='untie')."
    )
    parts = blocks(model, tied="untie")
    head, words = parts[-1].predictions, parts[0].embeddings.word_embeddings
    assert head.decoder.weight is not words.weight
    assert torch.equal(head.decoder.weight, words.weight)
    assert head.decoder.bias is head.bias, "what is tied inside of a block stays tied"


@pytest.mark.slow
def test_what_no_block_has_is_named(library: Any) -> None:
    with pytest.raises(TrainingError) as caught:
        blocks(library.BertModel(library.BertConfig(**SMALL)))
    assert str(caught.value) == (
        "blocks of the model: 'none has pooler.dense.weight, pooler.dense.bias', expected all weights. "
        "Build the model without what it does not use, or give a list of modules that has it."
    )


@pytest.mark.slow
def test_layers_with_a_window_are_refused(library: Any) -> None:
    config = library.Qwen2Config(**SMALL, num_key_value_heads=2, use_sliding_window=True, max_window_layers=0)
    with pytest.raises(TrainingError, match=r"layers: 'sliding_attention', expected layers that see all. Give a list"):
        blocks(library.Qwen2ForCausalLM(config))


def test_sequences_are_taken_as_they_are() -> None:
    layers = [nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)]
    for model in (nn.Sequential(*layers), nn.ModuleList(layers), layers, tuple(layers)):
        assert blocks(model) == layers


def test_unknown_models_and_words() -> None:
    with pytest.raises(TrainingError) as caught:
        blocks(nn.Linear(2, 2))
    assert str(caught.value) == (
        "model: 'Linear', expected nn.Sequential, a list of modules, or a transformers model of bert, roberta, gpt2, "
        "llama, qwen2, qwen3. Give a list of modules, each called with what the one before returns."
    )
    with pytest.raises(UsageError) as wrong:
        blocks([nn.Linear(2, 2)], tied="unite")
    assert str(wrong.value) == "tied: 'unite', expected one of refuse, untie. Did you mean \"untie\"?"


def test_a_dropped_layer_is_noticed() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model_blocks.check_complete(model, list(model))
    with pytest.raises(TrainingError, match=r"none has 1.weight, 1.bias"):
        model_blocks.check_complete(model, [model[0]])


def test_merged_layers_compute_the_same_and_take_their_side_inputs() -> None:
    class Shift(nn.Module):
        def forward(self, x: Tensor, shift: Tensor) -> Tensor:
            return x + shift

    torch.manual_seed(0)
    layers = [nn.Linear(4, 4), Shift(), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 4)]
    merged = model_blocks.merge(layers, (5, 1, 1, 5, 4), 3, joined=[3])
    assert [len(part.layers) if isinstance(part, model_blocks.MergedBlock) else 1 for part in merged] == [1, 2, 2]
    x, shift = torch.randn(3, 4), torch.randn(3, 4)
    assert torch.equal(through(merged, x, shift=shift), through(layers, x, shift=shift))
    assert merged[1].side_names >= {"shift"}
    with pytest.raises(UsageError, match="layers in all blocks: 4, expected 5"):
        model_blocks.merge(layers, (5, 1, 1, 5), 3)
