"""What every recurrent layer did at every step of one batch: captured, replayed, swept and labelled."""
