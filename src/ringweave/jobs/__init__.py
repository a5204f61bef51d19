"""Training jobs: request, admission, worker split and state machine. Pure decisions: no I/O, no clock, no torch."""
