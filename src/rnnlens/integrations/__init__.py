"""Public names for users of a single framework: one module per framework, imported on first use."""
