"""Running schedules: compiled to programs, run in lanes, several collectives at a time."""
