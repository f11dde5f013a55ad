"""Certificates: claims of results, compared with a reference run of the user's own model by its framework alone."""
