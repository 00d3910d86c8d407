"""What a running server holds: requests that arrive at random, and how many of them were answered in time."""
