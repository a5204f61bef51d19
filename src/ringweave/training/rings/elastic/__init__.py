"""Rings whose members come and go: only the ring that loses one stands still, and no step of it is lost."""
