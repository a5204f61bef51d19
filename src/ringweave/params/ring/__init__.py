"""The workers' side: one connection of the ring's representative, and what every rank of the ring does in a step."""
