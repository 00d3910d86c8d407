"""How many loops a training step runs."""
