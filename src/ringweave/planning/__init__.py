"""Searches: which schedule a group runs, in which order, with which shares."""
