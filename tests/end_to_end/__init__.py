"""The command that people type, run for real with two processes."""
