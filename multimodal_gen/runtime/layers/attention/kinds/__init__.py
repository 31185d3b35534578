"""The kinds of calls that are more than q, k and v: what each refuses, and how it is served."""
