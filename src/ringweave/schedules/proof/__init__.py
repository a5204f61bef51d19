"""Proof that a schedule computes its collective, and texts that say where it does not."""
