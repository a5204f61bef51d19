"""Plots of results that other packages computed, as PNG or SVG; matplotlib is loaded only when a plot is drawn."""
