"""A job's life as a state machine: what is recorded and observed goes in, what to do comes out. Nothing is done here."""
