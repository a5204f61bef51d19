"""Handwritten digits that come with scikit-learn: 1,797 images of 8 x 8."""

import torch
from sklearn.datasets import load_digits
from torch.utils.data import Subset, TensorDataset, random_split


def split(num_test: int) -> list[Subset]:
    """Returns those that are kept for the test, and the rest: images (1, 8, 8) from 0 to 1, with their labels."""
    images, labels = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
    samples = TensorDataset(images.float().reshape(-1, 1, 8, 8) / 16, labels)
    return random_split(samples, [num_test, len(samples) - num_test])
