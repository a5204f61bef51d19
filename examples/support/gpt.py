"""A small GPT over bytes: rotary attention, RMS norms before each block, no dropout."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

NUM_BYTES = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class GPTConfig:
    """The sizes of the model."""

    layers: int = 4
    """Blocks of attention and feed-forward."""
    width: int = 128
    """Length of the vector that stands for one byte; divisible by twice the heads."""
    heads: int = 4
    """Attention heads in a block."""
    context: int = 64
    """How many bytes the model sees at once."""


class Attention(nn.Module):
    """Causal self-attention with rotary positions: (batch, length, width) -> the same."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
        """Returns what each position gathers from itself and those before it."""
        batch, length, width = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        query, key = rotate(query, rotation), rotate(key, rotation)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(attended.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """Attention, then a feed-forward network, each added to what came in."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width)
        self.attention = Attention(config)
        self.feed_forward_norm = nn.RMSNorm(config.width)
        self.feed_forward = nn.Sequential(
            nn.Linear(config.width, 4 * config.width, bias=False),
            nn.GELU(),
            nn.Linear(4 * config.width, config.width, bias=False),
        )

    def forward(self, x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
        """Returns the refined (batch, length, width)."""
        x = x + self.attention(self.attention_norm(x), rotation)
        return x + self.feed_forward(self.feed_forward_norm(x))


class GPT(nn.Module):
    """Predicts each next byte of a sequence."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(NUM_BYTES, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width)
        self.head = nn.Linear(config.width, NUM_BYTES, bias=False)
        self.register_buffer("rotation", rotation_table(config), persistent=False)
        self._initialize()

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Returns the mean loss in nats per byte, for `inputs` and the bytes that follow, both (batch, length)."""
        return functional.cross_entropy(self.logits(inputs).flatten(0, 1), targets.flatten())

    def logits(self, inputs: torch.Tensor) -> torch.Tensor:
        """Returns what the model expects after each byte of `inputs`, (batch, length, 256)."""
        x = self.embedding(inputs)
        for block in self.blocks:
            x = block(x, self.rotation[: inputs.shape[1]])
        return self.head(self.norm(x))

    def _initialize(self) -> None:
        """Draws the first weights, each layer's so that what it puts out is about as large as what it takes in.

        Much smaller weights learn more slowly and are chaotic: a rounding error in a gradient would grow a
        hundred thousand times in fifty steps, and no two runs with another order of summation could be compared.
        """
        for name, parameter in self.named_parameters():
            if name.startswith("embedding"):
                nn.init.normal_(parameter, std=0.5)
            elif name.endswith(("out.weight", "feed_forward.2.weight")):
                nn.init.normal_(parameter, std=0.03)
            elif parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.06)


def rotation_table(config: GPTConfig) -> torch.Tensor:
    """Returns the cosines and sines of rotary positions, (context, 2, width / heads / 2)."""
    num_pairs = config.width // config.heads // 2
    frequencies = 10_000.0 ** (-torch.arange(num_pairs) / num_pairs)
    angles = torch.arange(config.context)[:, None] * frequencies
    return torch.stack((angles.cos(), angles.sin()), dim=1)


def rotate(x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """Returns `x` (..., length, head width) with each pair of features turned by the angle of its position."""
    cosine, sine = rotation.unbind(dim=1)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, first * sine + second * cosine), dim=-1)


@torch.no_grad()
def generate(model: GPT, prompt: bytes, *, num_bytes: int, temperature: float, seed: int) -> bytes:
    """Returns `prompt` continued by `num_bytes` sampled bytes."""
    device = model.head.weight.device
    generator = torch.Generator().manual_seed(seed)
    text = list(prompt)
    for _ in range(num_bytes):
        visible = torch.tensor([text[-model.config.context :]], device=device)
        probabilities = (model.logits(visible)[0, -1].cpu() / temperature).softmax(dim=-1)
        text.append(int(torch.multinomial(probabilities, 1, generator=generator)))
    return bytes(text)
