"""Systems measured beside each other on the same nodes, links and ranks."""
