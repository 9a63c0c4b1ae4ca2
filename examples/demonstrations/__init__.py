"""Demonstrations that the warm starts of the examples are trained on, one module per task."""
