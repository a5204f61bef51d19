"""Generators of schedules: one module per algorithm; rounds are computed on demand."""
