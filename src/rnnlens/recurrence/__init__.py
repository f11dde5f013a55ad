"""Numerics of recurrence on the array API, independent of frameworks, xarray, plotting and files."""
