"""Processes of a Dask cluster: the model on its way to workers, and a worker's threads, memory, errors and warnings."""
