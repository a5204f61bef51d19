"""Slurm itself: its commands run and read, what it is asked for, and its reasons in words."""
