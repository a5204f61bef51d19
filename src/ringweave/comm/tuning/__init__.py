"""Tuning: the ranks of a group choose schedules together while a job runs."""
