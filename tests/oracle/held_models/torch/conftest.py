"""Models of plain torch, as their authors run them: nothing is set up for them here."""
