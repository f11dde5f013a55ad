"""Code that the adapters of several frameworks share; it imports no framework."""
