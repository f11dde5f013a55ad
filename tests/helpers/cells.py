"""Build rnnlens cells by kind, for tests that run over kinds and options."""

from dataclasses import fields

from rnnlens.recurrence.cells import kinds


def make_cell(kind, *weights, **options):
    """Return a cell of a kind; options that the kind lacks are ignored."""
    field_names = {field.name for field in fields(kinds()[kind])}
    return kinds()[kind](*weights, **{name: value for name, value in options.items() if name in field_names})
