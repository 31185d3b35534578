"""Sub-block sparse attention."""
