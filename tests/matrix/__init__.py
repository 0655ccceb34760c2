"""One model on every layout: the same numbers everywhere."""
