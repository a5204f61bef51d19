"""From gradients to new parameters: an optimizer for each block, one norm over all stages, scaled losses."""
