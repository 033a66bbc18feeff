"""Figures: one style for all of them, token labels, learning curves."""
