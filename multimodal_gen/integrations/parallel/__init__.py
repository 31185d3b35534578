"""Stock denoisers over several ranks: their tokens split, or their guidance branches."""
