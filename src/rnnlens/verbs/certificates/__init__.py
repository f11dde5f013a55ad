"""Certificates of results: a claim of each verb, compared with a reference run of the user's own model."""
