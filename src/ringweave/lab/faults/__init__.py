"""What can be wrong with a lab on purpose, beside the rates of its links."""
