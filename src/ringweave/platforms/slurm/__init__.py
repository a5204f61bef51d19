"""Slurm platform: one allocation for each job, split as requested, with the job's controller inside of it.

Nothing runs on the login node. State that has to survive is in a folder of the shared file system;
docs/how-to/jobs-slurm.md.
"""
