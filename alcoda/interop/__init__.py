"""Checkpoints of other projects, read as ours."""
