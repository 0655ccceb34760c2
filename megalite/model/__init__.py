"""The transformer: its forward reads like the equations, with no collective in sight."""
