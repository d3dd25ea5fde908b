"""Training: the step, its schedule, checkpoints, and the run around them."""
