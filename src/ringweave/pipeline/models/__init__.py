"""A model as a list of blocks that no layer is missing from, and the blocks that a rank holds."""
