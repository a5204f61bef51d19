"""Models as lists of blocks: cut between layers (also transformers models), checked for completeness, merged.

The transformers library's forwards compute masks and positions once and pass them to all layers. Here each layer's
block computes them itself, from the side input `attention_mask` and its input: cheap next to the layer, and only
activations cross between blocks. Tests compare each model type with the library's own forward, bit for bit.

A rank has its own blocks with values and all others on the meta device (`BlockStore`).
"""

import copy
import io
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from ringweave.errors import TrainingError, UsageError
from ringweave.files.problems import suggest_closest
from ringweave.pipeline.runtime import boundaries
from ringweave.pipeline.runtime.boundaries import as_tuple
from ringweave.planning.partition import problem
from ringweave.planning.partition.problem import Layer

_EXTRA_STATE_SUFFIX = "_extra_state"
"""Suffix of its key in a torch `state_dict`."""


def extra_states(block: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (module name inside the block, extra state as uint8 [bytes]) for each module that has one."""
    for name, module in block.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            buffer = io.BytesIO()
            torch.save(module.get_extra_state(), buffer)
            yield name, torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)


def set_extra_state(block: nn.Module, name: str, raw: Tensor) -> None:
    """Set a module's extra state from the bytes that `extra_states` yielded."""
    loaded = torch.load(io.BytesIO(raw.cpu().numpy().tobytes()), weights_only=True)
    block.get_submodule(name).set_extra_state(loaded)


def without_extra_state(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The parameters and buffers of a module's `state_dict`."""
    return {name: value for name, value in state_dict.items() if name.rpartition(".")[2] != _EXTRA_STATE_SUFFIX}


class BlockStore:
    """All blocks of the model: this rank's with values, the others on the meta device, which takes no memory.

    The modules are modified in place: blocks that the rank does not hold are emptied.

    Raises:
        TrainingError: There are no blocks, or two of them share a parameter.
    """

    def __init__(self, modules: Sequence[nn.Module], held: Iterable[int], device: torch.device) -> None:
        if not modules:
            do = "Give the model's blocks in their order"
            raise TrainingError("blocks", got=0, expected="1 or more", do=do)
        check_untied(modules)
        self._modules = list(modules)
        self._device = device
        self._held = set(held)
        for index in range(len(modules)):
            self._modules[index] = modules[index].to(device if index in self._held else "meta")

    def __len__(self) -> int:
        return len(self._modules)

    def __getitem__(self, index: int) -> nn.Module:
        """A block; without values if it is not held."""
        return self._modules[index]

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self._modules)

    @property
    def held(self) -> tuple[int, ...]:
        """Indices of blocks with values, in order."""
        return tuple(sorted(self._held))

    def allocate(self, index: int) -> nn.Module:
        """Allocate a block on this rank's device; its values are undefined until they are filled in."""
        if index not in self._held:
            self._modules[index] = self._modules[index].to_empty(device=self._device)
            self._held.add(index)
        return self._modules[index]

    def set_block(self, index: int, module: nn.Module) -> None:
        """Hold a block that already has values, in place of its meta version."""
        self._modules[index] = module
        self._held.add(index)

    def drop_values(self, index: int) -> None:
        """Move a block to the meta device."""
        if index in self._held:
            self._modules[index] = self._modules[index].to("meta")
            self._held.remove(index)


def check_untied(modules: Sequence[nn.Module]) -> None:
    """Raise if two blocks share a parameter or buffer, since blocks may lie on different ranks.

    Raises:
        TrainingError: Names the first shared tensor in both blocks.
    """
    for (index, name), (first, first_name), _ in shared_tensors(modules):
        do = "Build the model without tied weights (tie_word_embeddings=False), or take blocks(model, tied='untie')"
        expected = "a tensor of the block's own, since blocks may lie on different ranks"
        got = f"{first_name} of block {first}"
        raise TrainingError(f"{name} of block {index}", got=got, expected=expected, do=do)


def shared_tensors(modules: Sequence[nn.Module]) -> Iterator[tuple[tuple[int, str], tuple[int, str], Tensor]]:
    """Yield (index and name, first index and name, tensor) for each tensor that an earlier block has too."""
    owners: dict[int, tuple[int, str]] = {}
    for index, module in enumerate(modules):
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            first = owners.setdefault(id(tensor), (index, name))
            if first[0] != index:
                yield (index, name), first, tensor


class EncoderEmbeddings(nn.Module):
    """Embeds tokens; positions and norm are the model's own."""

    def __init__(self, embeddings: nn.Module) -> None:
        super().__init__()
        self.embeddings = embeddings

    def forward(self, input_ids: Tensor) -> Tensor:
        """[samples, length] to [samples, length, width]."""
        return self.embeddings(input_ids=input_ids)


class EncoderBlock(nn.Module):
    """An encoder layer: each token attends to all tokens that the mask keeps."""

    def __init__(self, layer: nn.Module, config: Any) -> None:
        super().__init__()
        self.layer, self.config = layer, config

    def forward(self, hidden: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """[samples, length, width] to the same; the mask is [samples, length], 0 for padding."""
        from transformers.masking_utils import create_bidirectional_mask

        mask = create_bidirectional_mask(config=self.config, inputs_embeds=hidden, attention_mask=attention_mask)
        return _hidden_states(self.layer(hidden, mask))


class Gpt2Embeddings(nn.Module):
    """Embeds tokens and positions (GPT-2)."""

    def __init__(self, backbone: Any) -> None:
        super().__init__()
        self.wte, self.wpe, self.drop = backbone.wte, backbone.wpe, backbone.drop

    def forward(self, input_ids: Tensor) -> Tensor:
        """[samples, length] to [samples, length, width]."""
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        return self.drop(self.wte(input_ids) + self.wpe(positions))


class DecoderBlock(nn.Module):
    """A causal decoder layer, with rotary positions where the model has them."""

    def __init__(self, layer: nn.Module, config: Any, rotary: nn.Module | None) -> None:
        super().__init__()
        self.layer, self.config = layer, config
        self.rotary = copy.deepcopy(rotary)
        """A copy for each block: it has no weights, and blocks may lie on different ranks."""

    def forward(self, hidden: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """[samples, length, width] to the same; the mask is [samples, length], 0 for padding."""
        from transformers.masking_utils import create_causal_mask

        positions = torch.arange(hidden.shape[1], device=hidden.device)[None]
        # Positional: the last of them, a cache that we do not have, has another name from version to version.
        mask = create_causal_mask(self.config, hidden, attention_mask, None, position_ids=positions)
        more = {} if self.rotary is None else {"position_embeddings": self.rotary(hidden, position_ids=positions)}
        return _hidden_states(self.layer(hidden, attention_mask=mask, position_ids=positions, use_cache=False, **more))


def _hidden_states(output: Any) -> Tensor:
    """The hidden states of a layer's output, which some versions of the library put first in a tuple."""
    return output[0] if isinstance(output, tuple) else output


def _encoder_blocks(model: Any) -> list[nn.Module]:
    backbone = getattr(model, model.base_model_prefix, model)
    layers = [EncoderBlock(layer, backbone.config) for layer in backbone.encoder.layer]
    head = getattr(model, "cls", None) or getattr(model, "lm_head", None)
    return [EncoderEmbeddings(backbone.embeddings), *layers, *([head] if head is not None else [])]


def _gpt2_blocks(model: Any) -> list[nn.Module]:
    backbone = getattr(model, "transformer", model)
    layers = [DecoderBlock(layer, backbone.config, None) for layer in backbone.h]
    return [Gpt2Embeddings(backbone), *layers, *_head_blocks(model, backbone.ln_f)]


def _llama_blocks(model: Any) -> list[nn.Module]:
    backbone = getattr(model, "model", model)
    layers = [DecoderBlock(layer, backbone.config, backbone.rotary_emb) for layer in backbone.layers]
    return [backbone.embed_tokens, *layers, *_head_blocks(model, backbone.norm)]


def _head_blocks(model: Any, norm: nn.Module) -> list[nn.Module]:
    head = getattr(model, "lm_head", None)
    return [norm if head is None else nn.Sequential(norm, head)]


_BLOCKS_BY_MODEL_TYPE: Mapping[str, Callable[[Any], list[nn.Module]]] = MappingProxyType(
    {
        "bert": _encoder_blocks,
        "roberta": _encoder_blocks,
        "gpt2": _gpt2_blocks,
        "llama": _llama_blocks,
        "qwen2": _llama_blocks,
        "qwen3": _llama_blocks,
    }
)
MODEL_TYPES = tuple(_BLOCKS_BY_MODEL_TYPE)
"""Supported values of a model's `config.model_type`."""


def transformer_blocks(model: nn.Module) -> list[nn.Module]:
    """Blocks of a transformers model: embeddings, layers, head.

    Raises:
        TrainingError: The model type is unknown, or layers use sliding attention.
    """
    config: Any = getattr(model, "config", None)
    kind = getattr(config, "model_type", None)
    if kind not in _BLOCKS_BY_MODEL_TYPE:
        expected = f"nn.Sequential, a list of modules, or a transformers model of {', '.join(MODEL_TYPES)}"
        do = "Give a list of modules, each called with what the one before returns"
        raise TrainingError("model", got=kind or type(model).__name__, expected=expected, do=do)
    if "sliding_attention" in (getattr(config, "layer_types", None) or ()):
        do = "Give a list of modules that hand each layer its own mask"
        raise TrainingError("layers", got="sliding_attention", expected="layers that see all", do=do)
    return _BLOCKS_BY_MODEL_TYPE[kind](model)


TIED_OPTIONS = ("refuse", "untie")


def blocks(model: nn.Module | Sequence[nn.Module], *, tied: str = "refuse") -> list[nn.Module]:
    """The model's blocks in order of computation; each is called with the output of the previous one.

    `nn.Sequential`, `nn.ModuleList` and lists of modules are used as they are. Transformers models whose type is in
    `MODEL_TYPES` are split into embeddings, layers and head; attention masks are side inputs. For any other model give
    a list of modules.

    Args:
        model: The model; the blocks are its modules, not copies.
        tied: Treatment of a weight that two blocks share: `refuse`, or `untie`: the later block gets its own copy,
            trained separately from then on.

    Raises:
        TrainingError: The model type is unknown, a weight is in no block, or blocks share weights.
        UsageError: An unknown word for `tied`.
    """
    if tied not in TIED_OPTIONS:
        do = suggest_closest(tied, TIED_OPTIONS) or "Take one of these"
        raise UsageError("tied", got=tied, expected=f"one of {', '.join(TIED_OPTIONS)}", do=do)
    if isinstance(model, nn.Module) and not isinstance(model, nn.Sequential | nn.ModuleList):
        found = transformer_blocks(model)
        check_complete(model, found)
    else:
        found = list(model)
    if tied == "untie":
        for (index, _), _, tensor in list(shared_tensors(found)):
            _untie(found[index], tensor)
    check_untied(found)
    return found


def check_complete(model: nn.Module, found: Sequence[nn.Module]) -> None:
    """Raise unless the blocks together hold every parameter and persistent buffer of the model, by count and checksum.

    Raises:
        TrainingError: Something of the model is in no block.
    """
    names: dict[int, str] = {}
    for name, tensor in without_extra_state(model.state_dict(keep_vars=True)).items():
        names.setdefault(id(tensor), name)
    held = {id(tensor) for block in found for tensor in without_extra_state(block.state_dict(keep_vars=True)).values()}
    try:
        problem.check_complete(list(names.values()), [[name for key, name in names.items() if key in held]])
    except UsageError as cause:
        do = "Build the model without what it does not use, or give a list of modules that has it"
        missing = [name for key, name in names.items() if key not in held]
        raise TrainingError(
            "blocks of the model", got=f"none has {', '.join(missing[:3])}", expected="all weights", do=do
        ) from cause


def _untie(block: nn.Module, tensor: Tensor) -> None:
    """Give the block its own copy of a tensor, wherever it uses this one."""
    own = copy.deepcopy(tensor)
    for module in block.modules():
        for table in (module._parameters, module._buffers):
            for key, value in table.items():
                if value is tensor:
                    table[key] = own  # pyrefly: ignore - a parameter for a parameter, a buffer for a buffer


class MergedBlock(nn.Module):
    """Several layers as one block."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    @property
    def side_names(self) -> frozenset[str]:
        """Side inputs that any of its layers takes."""
        return frozenset().union(*(boundaries.side_input_names(layer) for layer in self.layers))

    def forward(self, *values: Tensor, **side: Tensor) -> Tensor | tuple[Tensor, ...]:
        for layer in self.layers:
            values = as_tuple(layer(*values, **boundaries.select_side_inputs(layer, side)))
        return values[0] if len(values) == 1 else values


def merge(
    layers: Sequence[nn.Module], work: Sequence[float], max_blocks: int, joined: Collection[int] = ()
) -> list[nn.Module]:
    """Merge consecutive layers into at most `max_blocks` blocks; the same on all ranks if `work` is.

    Layers that must stay together are merged first, then repeatedly the two neighbours with the least total work.

    Args:
        layers: Layers in the model's order.
        work: Work of each layer, such as the forward and backward times of a `Profile`.
        max_blocks: Greatest number of blocks, 1 or more.
        joined: Layers, counted from 0, after which no cut is allowed.

    Raises:
        UsageError: Numbers that do not fit the layers.
    """
    named = [Layer(name=str(index), work=each) for index, each in enumerate(work)]
    found = problem.merge_layers(named, max_blocks, joined)
    names = [layer.name for layer in named]
    problem.check_complete(list(map(str, range(len(layers)))), [names[block.first : block.end] for block in found])
    return [
        layers[block.first] if block.end == block.first + 1 else MergedBlock(layers[block.first : block.end])
        for block in found
    ]
