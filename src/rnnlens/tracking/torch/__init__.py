"""Watching of training loops in PyTorch."""
