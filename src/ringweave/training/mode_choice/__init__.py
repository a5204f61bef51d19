"""Mode choice of `auto`: trials of the model on every rank, benchmarked steps, and a forecast of all modes."""
