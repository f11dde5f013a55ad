"""Results: labelled arrays per layer with self-checks, a certificate, a repr and file input and output."""

from .lazy_dask import keep_dask_out

keep_dask_out()
