"""What the examples share, in plain PyTorch: text, model, checkpoints, reports."""
