"""Certificates: a quantity of each result, compared with a reference run of the user's own model."""
