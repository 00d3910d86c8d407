"""Measures a trained model: bits per byte by depth with intervals, a baseline, and where the loops converge."""
