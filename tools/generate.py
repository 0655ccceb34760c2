"""Generate text from a checkpoint.

    python tools/generate.py --load runs/tiny_llama --prompt "It was a truth"
    torchrun --nproc-per-node 4 tools/generate.py --load runs/big --tensor-model-parallel-size 2 \\
        --pipeline-model-parallel-size 2 --prompt "It was" "Once"

Works on a checkpoint of any tensor-, pipeline- and data-parallel layout, on as many processes as there are;
needs the tokenizer's files where they were.
"""

from __future__ import annotations

import argparse
import os

from megalite.command import run_command


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--load", required=True, metavar="DIR", help="checkpoint folder of a training run (its --save)"
    )
    parser.add_argument("--iteration", type=int, help="which checkpoint; default: the latest complete one")
    parser.add_argument(
        "--prompt",
        nargs="+",
        action="extend",
        metavar="TEXT",
        help="text to go on from, or several; may be repeated (default: 'It was a')",
    )
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
        "--top-p", type=float, default=1.0, help="draw among the likeliest of this probability (default: 1)"
    )
    parser.add_argument(
        "--seed", type=int, default=1234, help="the same seed gives the same text (default: 1234)"
    )
    for axis in ("tensor", "pipeline"):
        parser.add_argument(
            f"--{axis}-model-parallel-size",
            type=int,
            default=1,
            metavar="N",
            help="under torchrun (default: 1)",
        )
    flags = parser.parse_args()

    from megalite.config import ConfigErrors, exit_with_errors
    from megalite.leave import last_words, leave
    from megalite.training.launcher import place_of
    from megalite.training.orphan import end_with_torchrun

    end_with_torchrun()
    try:
        place = place_of(os.environ)
    except ConfigErrors as errors:
        exit_with_errors(errors, rank=0)
    tensor, pipeline = flags.tensor_model_parallel_size, flags.pipeline_model_parallel_size
    if min(tensor, pipeline) < 1 or tensor * pipeline != place.world_size:
        rule = f"TP {tensor} x PP {pipeline} must be the number of processes, {place.world_size}"
        flags_at_fault = "--tensor-model-parallel-size, --pipeline-model-parallel-size"
        leave(f"error: {flags_at_fault}: {rule}", place.rank, code=1)

    from megalite.accelerator import DeviceError, backend_for, local_device
    from megalite.checkpoint import CheckpointError
    from megalite.data.errors import DataError
    from megalite.generation.decode import generate
    from megalite.generation.model import TIMEOUT, load_model
    from megalite.generation.sampling import Sampling
    from megalite.training.errors import RendezvousError, TrainingError
    from megalite.training.process_group import process_group

    try:
        sampling = Sampling(flags.temperature, flags.top_k, flags.top_p, flags.seed)
        device = local_device(place.local_rank)
        with process_group(backend_for(device, "auto"), place, TIMEOUT):
            model = load_model(flags.load, device, tensor, pipeline, flags.iteration)
            prompts = [list(ids) for ids in model.tokenizer.encode_batch(flags.prompt or ["It was a"])]
            added = generate(model, prompts, flags.max_new_tokens, sampling)
    except (DeviceError, RendezvousError) as error:  # of this rank alone
        last_words(f"error: {error}")
        return 1
    except (TrainingError, CheckpointError, DataError, ValueError) as error:  # the same on every rank
        leave(f"error: {error}", place.rank, code=1)
    if place.rank == 0:
        texts = [model.tokenizer.decode([*prompt, *new]) for prompt, new in zip(prompts, added, strict=True)]
        print("\n\n".join(texts))
    return 0


if __name__ == "__main__":
    run_command(main, "interrupted")
