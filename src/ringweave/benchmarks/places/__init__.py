"""Where a benchmark runs: the nodes of a lab, or this machine as it is; and what its links really carry."""
