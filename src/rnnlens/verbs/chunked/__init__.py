"""Lazy results of data in Dask chunks: one task per chunk of samples, nothing computed until asked."""
