"""Fault injection into a job in a lab, by script or at random, and its cost: `ringweave chaos`."""
