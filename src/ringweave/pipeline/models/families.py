"""Blocks of the transformers library's common models: what their own `forward` does, cut between the layers.

The library's forwards compute masks and positions once and hand them to all layers. Here each layer's block does that
for itself, from the side input `attention_mask` and what arrives: small next to the layer, and nothing but activations
has to cross. Tests compare each family with the model's own forward, bit for bit.
"""

import copy
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from ringweave.errors import TrainingError, explain


class EncoderEmbeddings(nn.Module):
    """Token numbers to the first activations; positions and norm are the model's own."""

    def __init__(self, embeddings: nn.Module) -> None:
        super().__init__()
        self.embeddings = embeddings

    def forward(self, input_ids: Tensor) -> Tensor:
        """[samples, length] to [samples, length, width]."""
        return self.embeddings(input_ids=input_ids)


class EncoderLayer(nn.Module):
    """One layer in which each token sees all others that the mask leaves."""

    def __init__(self, layer: nn.Module, config: Any) -> None:
        super().__init__()
        self.layer, self.config = layer, config

    def forward(self, hidden: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """[samples, length, width] to the same; the mask is [samples, length], 0 for padding."""
        from transformers.masking_utils import create_bidirectional_mask

        mask = create_bidirectional_mask(config=self.config, inputs_embeds=hidden, attention_mask=attention_mask)
        return _first(self.layer(hidden, mask))


class LearnedPositions(nn.Module):
    """Token numbers to activations, with an embedding of each position (GPT-2)."""

    def __init__(self, backbone: Any) -> None:
        super().__init__()
        self.wte, self.wpe, self.drop = backbone.wte, backbone.wpe, backbone.drop

    def forward(self, input_ids: Tensor) -> Tensor:
        """[samples, length] to [samples, length, width]."""
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        return self.drop(self.wte(input_ids) + self.wpe(positions))


class DecoderLayer(nn.Module):
    """One layer in which each token sees those before it; with rotary positions where the model has them."""

    def __init__(self, layer: nn.Module, config: Any, rotary: nn.Module | None) -> None:
        super().__init__()
        self.layer, self.config = layer, config
        self.rotary = copy.deepcopy(rotary)
        """Each block's own: it has no weights, and blocks may lie on different ranks."""

    def forward(self, hidden: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """[samples, length, width] to the same; the mask is [samples, length], 0 for padding."""
        from transformers.masking_utils import create_causal_mask

        positions = torch.arange(hidden.shape[1], device=hidden.device)[None]
        # By place: the library calls the last of them, a cache that we have not, otherwise from version to version.
        mask = create_causal_mask(self.config, hidden, attention_mask, None, position_ids=positions)
        more = {} if self.rotary is None else {"position_embeddings": self.rotary(hidden, position_ids=positions)}
        return _first(self.layer(hidden, attention_mask=mask, position_ids=positions, use_cache=False, **more))


def _first(output: Any) -> Tensor:
    """Layers return the activations, in some versions of the library with more behind them."""
    return output[0] if isinstance(output, tuple) else output


def _encoder(model: Any) -> list[nn.Module]:
    backbone = getattr(model, model.base_model_prefix, model)
    layers = [EncoderLayer(layer, backbone.config) for layer in backbone.encoder.layer]
    head = getattr(model, "cls", None) or getattr(model, "lm_head", None)
    return [EncoderEmbeddings(backbone.embeddings), *layers, *([head] if head is not None else [])]


def _gpt2(model: Any) -> list[nn.Module]:
    backbone = getattr(model, "transformer", model)
    layers = [DecoderLayer(layer, backbone.config, None) for layer in backbone.h]
    return [LearnedPositions(backbone), *layers, *_ending(model, backbone.ln_f)]


def _llama(model: Any) -> list[nn.Module]:
    backbone = getattr(model, "model", model)
    layers = [DecoderLayer(layer, backbone.config, backbone.rotary_emb) for layer in backbone.layers]
    return [backbone.embed_tokens, *layers, *_ending(model, backbone.norm)]


def _ending(model: Any, norm: nn.Module) -> list[nn.Module]:
    head = getattr(model, "lm_head", None)
    return [norm if head is None else nn.Sequential(norm, head)]


_FAMILIES: Mapping[str, Callable[[Any], list[nn.Module]]] = MappingProxyType(
    {
        "bert": _encoder,
        "roberta": _encoder,
        "gpt2": _gpt2,
        "llama": _llama,
        "qwen2": _llama,
        "qwen3": _llama,
    }
)
NAMES = tuple(_FAMILIES)
"""Values of a model's `config.model_type` that are known."""


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The blocks of a model of a known family: embeddings, layers, head.

    Raises:
        TrainingError: Of no known family, or with layers that see only a window.
    """
    config: Any = getattr(model, "config", None)
    kind = getattr(config, "model_type", None)
    if kind not in _FAMILIES:
        expected = f"nn.Sequential, a list of modules, or a transformers model of {', '.join(NAMES)}"
        do = "Give a list of modules, each called with what the one before returns"
        raise TrainingError(explain("model", got=kind or type(model).__name__, expected=expected, do=do))
    if "sliding_attention" in (getattr(config, "layer_types", None) or ()):
        do = "Give a list of modules that hand each layer its own mask"
        raise TrainingError(explain("layers", got="sliding_attention", expected="layers that see all", do=do))
    return _FAMILIES[kind](model)
