"""How kernels are launched: what is prepared, what releases of Triton differ in, self-checks."""
