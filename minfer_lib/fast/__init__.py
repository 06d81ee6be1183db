"""What is left to remove: launches, the work between them, and waiting for the host (chapter 8)."""
