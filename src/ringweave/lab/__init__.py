"""A cluster file brought up on one Linux machine: nodes as namespaces, links with limited rates."""
