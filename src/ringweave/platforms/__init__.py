"""Platforms on which jobs run, behind one interface: this machine, Slurm, Kubernetes, and adapters of others."""
