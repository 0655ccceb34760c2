"""Failures that end a run and are the user's to mend: reported as a message, without a traceback."""


class TrainingError(RuntimeError):
    """A run cannot start or go on; the message says why and what would help."""


class RendezvousError(TrainingError):
    """The first rank has not come or is gone, or others have not come to it: all who wait tell it."""
