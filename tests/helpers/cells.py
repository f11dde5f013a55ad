"""Cells of ours by their kind, for tests that run over kinds and options."""

from dataclasses import fields

from rnnlens.recurrence.cells import kinds


def make(kind, *weights, **options):
    """A cell of that kind; options that it does not have are left out."""
    known = {field.name for field in fields(kinds()[kind])}
    return kinds()[kind](*weights, **{name: value for name, value in options.items() if name in known})
