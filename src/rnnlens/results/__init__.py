"""Results: labelled arrays per layer with self-checks, a certificate, a repr and file input and output."""
