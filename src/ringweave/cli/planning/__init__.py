"""Verbs that only compute: what a plan, a split, a partition or a formula says, before anything runs."""
