"""The training loop: what differs from TRL's trainer, and what is measured and written in it."""
