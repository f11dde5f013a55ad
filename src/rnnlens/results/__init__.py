"""Arrays and vocabulary in, labelled results out: schema, files, self-checks, repr."""
