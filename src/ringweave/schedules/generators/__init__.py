"""One file per way to run a collective; each makes a schedule, lazily."""
