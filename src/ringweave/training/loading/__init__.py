"""Loaders that give each rank its part of every batch."""
