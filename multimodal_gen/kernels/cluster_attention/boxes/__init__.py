"""Lists of what the SM90 kernel loads."""
