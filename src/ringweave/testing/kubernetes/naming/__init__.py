"""What processes that play Pods have on their path."""
