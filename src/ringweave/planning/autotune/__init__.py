"""Autotuning of a running job: finds the schedule that measures fastest, and whether link rates have drifted.

Pure: observations in, decisions out. `comm/tuning` exchanges them between the ranks.
"""
