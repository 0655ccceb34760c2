"""The plain one-process model that every layout is held against. It imports nothing from megalite."""
