"""Training jobs: request, admission, split, state machine. Pure decisions: no I/O, no clock, no torch.

What is observed goes in, what to do comes out; launchers do it. docs/jobs.md shows states and reasons.
"""
