"""The model to beat: each byte guessed from the one before it."""

import torch


def fit(train: torch.Tensor, add_k: float = 0.1) -> torch.Tensor:
    """Returns log P(next byte | byte), (256, 256) float64, counted in `train` with `add_k` added to every count."""
    pairs = train[:-1].long() * 256 + train[1:].long()
    counts = torch.bincount(pairs, minlength=256 * 256).double().view(256, 256) + add_k
    return (counts / counts.sum(dim=1, keepdim=True)).log()


def nats_per_byte(log_probabilities: torch.Tensor, inputs: torch.Tensor, targets: torch.Tensor) -> float:
    """Returns the mean negative log-probability of `targets`, each judged from the byte before it in `inputs`."""
    return -log_probabilities[inputs, targets].mean().item()
