"""Communication: the process group of torch.distributed that runs collectives by verified schedules."""
