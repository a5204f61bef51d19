"""Execution of a train step: stages on stock torch.distributed.pipelining, their boundaries and random numbers."""
