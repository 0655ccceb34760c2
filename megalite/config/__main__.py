"""`python -m megalite.config --world-size N <flags>`: validate a command line in one cheap process.

Exit code 0 when a run of N processes could start, 2 with the errors on stderr when not.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from megalite.config.parse import parse_or_exit


def main(argv: Sequence[str]) -> int:
    """Check `argv`; the training flags are all but --world-size."""
    own = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    own.add_argument("--world-size", type=int, default=1)
    known, training = own.parse_known_args(list(argv))
    parse_or_exit(training, known.world_size, rank=0)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
