"""Following training: records made on a schedule, written to a run that can be read while it grows."""
