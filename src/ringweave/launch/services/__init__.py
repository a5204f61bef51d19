"""Places where jobs run, as users see them: one protocol for this machine, Slurm, Kubernetes, and those of others."""
