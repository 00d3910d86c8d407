"""An OpenAI-compatible server of one model, with depth as a dial (docs/serving.md). Nothing here imports torch at once:
the port opens while the model is loaded."""
