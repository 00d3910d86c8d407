"""The model: one `RecurrentLM` whose design is a point in a space of small choices, each with its cost."""
