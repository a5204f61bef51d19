"""How a worker becomes a member while the others go on: it takes part with nothing, and does what they did later."""
