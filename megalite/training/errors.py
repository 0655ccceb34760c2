"""Failures that end a run and are the user's to mend: reported as a message, without a traceback."""


class TrainingError(RuntimeError):
    """A run cannot start or go on; the message says why and what would help."""


class RendezvousError(TrainingError):
    """The first rank has not come, or not all others have to it: each of those that wait tells it itself."""
