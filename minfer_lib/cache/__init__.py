"""Where are keys and values? One request's, a slot for each request, blocks (chapters 3, 4 and 6)."""
