"""Files that are complete or absent, and are checked before they are believed."""
