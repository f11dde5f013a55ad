"""Traces of one batch: requested layers and quantities, captured, replayed, swept and labelled."""
