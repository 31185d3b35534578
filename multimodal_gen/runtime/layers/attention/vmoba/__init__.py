"""V-MoBA's parts: chunks of a video, attention over chosen ones, the authors' kernel."""
