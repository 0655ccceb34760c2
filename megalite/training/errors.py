"""Failures that end a run and are the user's to mend: reported as a message, without a traceback."""


class TrainingError(RuntimeError):
    """A run cannot start or go on; the message says why and what would help."""


class NobodyCame(TrainingError):
    """What a run needs of other ranks has not come; those of this rank do not know of each other."""
