"""One folder per deep-learning framework; reached by name through :mod:`rnnlens.adapters.registry` only."""
