"""Following a training in torch: a plain loop, and what the trainers built on it share."""
