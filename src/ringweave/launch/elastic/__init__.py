"""Runs whose workers may die and come back: coordinators beside the workers, and who is started again when."""
