"""The Triton provider: SM80 and later, ROCm, and Triton's interpreter."""
