"""What a program of the SM90 kernel works on."""
