"""The kernel for every GPU since SM80, in Triton."""
