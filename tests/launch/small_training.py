"""The script of jobs that train in the tests, as far as it is the same for all of them."""

PREPARED = """
import os, pathlib, time, torch, ringweave
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randn(32, 4)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8)
model, optimizer, loader = ringweave.prepare(model, optimizer, loader)
"""
"""Four batches of eight samples; the loop over `loader` is the test's own."""
