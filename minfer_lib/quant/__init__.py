"""How few bytes will do? INT8 weights (chapter 5)."""
