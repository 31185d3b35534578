"""Groups and collectives for sequence parallelism; one device in this build."""
