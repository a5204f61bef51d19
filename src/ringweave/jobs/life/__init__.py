"""A job's life, a state machine: what is recorded and observed goes in, what to do comes out; nothing is done."""
