"""Work and loads of the SM90 kernel."""
