"""Draws what others computed, as PNG or SVG; matplotlib is loaded only when something is drawn."""
