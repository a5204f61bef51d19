"""Workers started, observed and ended somewhere; deciding is kept apart from doing."""
