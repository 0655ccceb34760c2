"""Generate text from a checkpoint.

    python tools/generate.py --load runs/tiny_llama --prompt "It was a truth"

Works on a checkpoint of any tensor-, pipeline- and data-parallel layout; needs the tokenizer's files where
they were.
"""

from __future__ import annotations

import argparse
import sys


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--load", required=True, metavar="DIR", help="checkpoint folder of a training run (its --save)"
    )
    parser.add_argument("--iteration", type=int, help="which checkpoint; default: the latest complete one")
    parser.add_argument("--prompt", default="It was a", help="text to go on from (default: %(default)r)")
    parser.add_argument(
        "--max-new-tokens", type=int, default=100, help="stop after so many tokens (default: 100)"
    )
    parser.add_argument(
        "--temperature", type=float, default=0.8, help="0: always the likeliest token (default: 0.8)"
    )
    parser.add_argument(
        "--top-k", type=int, default=50, help="draw among the k likeliest; 0: among all (default: 50)"
    )
    parser.add_argument(
        "--seed", type=int, default=1234, help="the same seed gives the same text (default: 1234)"
    )
    flags = parser.parse_args()

    from megalite.checkpoint import CheckpointError
    from megalite.data.errors import DataError
    from megalite.training.generate import Sampling, generate, load_model

    try:
        model = load_model(flags.load, flags.iteration)
        tokenizer = model.tokenizer
        prompt = tokenizer.encode_batch([flags.prompt])[0]
        sampling = Sampling(flags.temperature, flags.top_k, flags.seed)
        new = list(generate(model, list(prompt), flags.max_new_tokens, sampling))
    except (CheckpointError, DataError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(tokenizer.decode([*prompt, *new]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
