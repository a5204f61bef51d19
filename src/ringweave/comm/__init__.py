"""The only room that talks to torch.distributed: the backend, executors of schedules, placement of ranks."""
