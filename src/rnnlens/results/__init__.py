"""Results: labelled arrays per layer with self-checks, a certificate, a repr and file input and output."""

from xarray.namedarray import pycompat, utils

from ..autodiff.tensors import keep_dask_out

keep_dask_out(pycompat, utils)
