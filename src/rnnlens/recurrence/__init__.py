"""Pure numerics of recurrence on the array API: no framework, no xarray, no plotting, no files."""
