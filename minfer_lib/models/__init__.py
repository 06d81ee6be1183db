"""What do I run? Loading a model, and what an engine has to know about it (chapter 1)."""
