"""Which mode `auto` is: a trial of the model on every rank, and a forecast of all modes from what it took."""
