"""Who sees whom? Many requests in one row of tokens, over any cache (chapters 4 and 6)."""
