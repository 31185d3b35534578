"""One adapter per model family."""
