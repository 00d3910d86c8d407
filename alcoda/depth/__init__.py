"""How many loops run: drawn in training, and where tokens leave early."""
