"""Training: a recipe becomes a run folder with checkpoints, metrics and provenance."""
