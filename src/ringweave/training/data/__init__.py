"""Data loading: reads the script's DataLoader and gives each rank its portion of every batch."""
