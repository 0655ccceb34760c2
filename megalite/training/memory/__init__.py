"""Where the bytes of a run are: told before it starts, measured in its first step."""
