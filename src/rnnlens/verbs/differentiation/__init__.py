"""Gradients of a target by a model's tensors: request, plan, pull-back, batches, and causes of missing gradients."""
