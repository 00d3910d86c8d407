"""Using a trained model: logits and text."""
