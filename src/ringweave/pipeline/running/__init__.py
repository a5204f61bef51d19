"""What runs a step: stages on stock torch.distributed.pipelining, what crosses between them, what they draw."""
