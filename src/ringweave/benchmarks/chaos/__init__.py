"""Faults that happen to a job in a lab by script or at random, and what they cost: `ringweave chaos`."""
