"""Moving tokens where every head has an order of its own."""
