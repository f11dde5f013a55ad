"""Traces of one batch: the layers and quantities asked for, captured, replayed, swept and labelled."""
