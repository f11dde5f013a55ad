"""Watching a training loop of JAX."""
