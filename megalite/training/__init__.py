"""The training run: what happens in what order."""
