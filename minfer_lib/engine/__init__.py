"""Who runs when? From one request at a time to continuous batching (chapters 2 to 4)."""
