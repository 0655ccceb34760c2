"""Measure megalite beside its alternatives, all in one run.

python tools/benchmark.py train      # whole training steps on CPU cores, beside Transformers and torch DDP
python tools/benchmark.py pipeline   # every pipeline schedule with sleeps as compute, beside its prediction
python tools/benchmark.py optimizer  # norm, clip and AdamW, beside torch's
python tools/benchmark.py kernels    # every fused operation, beside torch's; CSV and pictures
python tools/benchmark.py head       # output layer and loss at once, and in chunks: time and memory (CPU)
python tools/benchmark.py data       # from text to samples, beside tokenizers, NumPy and megatron-core
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SAMPLE = ROOT / "examples" / "data" / "sample.jsonl"

sys.path.insert(0, str(ROOT))  # run as a script: find tools.benchmarks


def main() -> int:
    from megalite.data.settings import whole_number
    from megalite.flags import Once

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    train = commands.add_parser(
        "train",
        help="tokens/s of training steps on this machine's CPU",
        description="Without further flags: a model of 60 million parameters in several layouts, beside its "
        "alternatives. With flags of training (see examples/pretrain_gpt.sh --help): only the run that they "
        "describe; what they leave open is as in tools/benchmarks/llama_60m.yaml.",
        usage="benchmark.py train [--rounds N] [--steps N] [--processes N] [--threads N] [flags of training]",
        allow_abbrev=False,
    )
    train.add_argument(
        "--rounds", type=whole_number(1), default=5, help="times that every contender runs (default: 5)"
    )
    train.add_argument("--steps", type=whole_number(1), default=2, help="timed steps in each (default: 2)")
    for name, default in (("processes", 1), ("threads", 2)):
        train.add_argument(
            f"--{name}",
            type=whole_number(1),
            default=default,
            help=f"of a run given by further flags (default: {default})",
        )
    pipeline = commands.add_parser("pipeline", help="step time of each schedule, a sleep as its compute")
    pipeline.add_argument("--pp", type=whole_number(1), default=4, help="processes (default: 4)")
    pipeline.add_argument("--microbatches", type=whole_number(1), default=8, help="a step (default: 8)")
    pipeline.add_argument(
        "--milliseconds", type=float, default=40, help="of a forward, an input and a weight gradient each"
    )
    pipeline.add_argument(
        "--rounds", type=whole_number(1), default=5, help="times that each runs (default: 5)"
    )
    optimizer = commands.add_parser("optimizer", help="norm, clip and AdamW, in each number format")
    optimizer.add_argument(
        "--parameters", type=whole_number(1), default=50_000_000, help="in all (default: 5e7)"
    )
    optimizer.add_argument(
        "--rounds", type=whole_number(1), default=15, help="steps of each form (default: 15)"
    )
    optimizer.add_argument("--threads", type=whole_number(1), default=2, help="on a CPU (default: 2)")
    kernels = commands.add_parser("kernels", help="each fused operation, forward and backward")
    kernels.add_argument(
        "--rounds", type=whole_number(1), default=10, help="calls of each form (default: 10)"
    )
    kernels.add_argument("--threads", type=whole_number(1), default=2, help="on a CPU (default: 2)")
    kernels.add_argument("--compile", action="store_true", help="time torch.compile of torch's form too")
    kernels.add_argument(
        "--output", type=Path, default=Path("runs/kernels"), help="folder of the CSV and PNGs"
    )
    head = commands.add_parser("head", help="output layer with loss, at once and in chunks")
    head.add_argument("--tokens", type=whole_number(1), default=2048, help="in one pass (default: 2048)")
    head.add_argument("--hidden", type=whole_number(1), default=1024, help="hidden size (default: 1024)")
    head.add_argument("--vocabulary", type=whole_number(1), default=32768, help="its size (default: 32768)")
    head.add_argument("--chunk-mib", type=float, default=64.0, help="logits in a chunk, MiB (default: 64)")
    head.add_argument("--rounds", type=whole_number(1), default=5, help="times that each runs (default: 5)")
    head.add_argument("--threads", type=whole_number(1), default=2, help="of each (default: 2)")
    data = commands.add_parser(
        "data", help="preprocessing, index building, blending, reading; megatron-core's where it is installed"
    )
    data.add_argument("--rounds", type=whole_number(1), default=3, help="times that each runs (default: 3)")
    data.add_argument(
        "--documents", type=whole_number(1), default=10_000_000, help="of the indices (default: 1e7)"
    )
    data.add_argument("--corpus", type=Path, default=SAMPLE, help="JSON lines (default: the sample corpus)")
    data.add_argument(
        "--parts",
        nargs="+",
        action=Once,
        choices=["preprocessing", "writing", "reading", "index", "blending"],
        default=["preprocessing", "writing", "reading", "index", "blending"],
        help="What to measure (default: all).",
    )
    data.add_argument(
        "--tokenizer-model", type=Path, help="tokenizer.json (default: one trained on the corpus)"
    )
    flags, training = parser.parse_known_args()
    if flags.command == "train":
        return _train(flags, training)
    if training:
        parser.error(f"unrecognized arguments: {' '.join(training)}")
    run = {
        "pipeline": _pipeline,
        "optimizer": _optimizer,
        "kernels": _kernels,
        "head": _head,
        "data": _data,
    }
    return run[flags.command](flags)


def _train(flags: argparse.Namespace, training: Sequence[str]) -> int:
    from megalite.config import parse_or_exit
    from tools.benchmarks.contender import with_recipe
    from tools.benchmarks.train import SETTINGS, Setting, benchmark_training, matmul_rate, report

    settings: tuple[Setting, ...] = SETTINGS
    if training:
        parse_or_exit(with_recipe(training), flags.processes, rank=0)  # errors before anything is started
        settings = (Setting("as given", flags.processes, flags.threads, tuple(training)),)
    report(benchmark_training(flags.rounds, flags.steps, settings), matmul_rate())
    return 0


def _pipeline(flags: argparse.Namespace) -> int:
    from tools.benchmarks.pipeline import benchmark_pipeline, table

    print(table(benchmark_pipeline(flags.pp, flags.microbatches, flags.milliseconds, flags.rounds)))
    return 0


def _optimizer(flags: argparse.Namespace) -> int:
    from tools.benchmarks.adamw import benchmark_adamw, table

    print(table(benchmark_adamw(flags.parameters, threads=flags.threads, rounds=flags.rounds)))
    return 0


def _kernels(flags: argparse.Namespace) -> int:
    import torch

    from tools.benchmarks.kernels import benchmark_kernels, table

    torch.set_num_threads(flags.threads)
    print(table(benchmark_kernels(flags.output, flags.rounds, flags.compile)))
    return 0


def _head(flags: argparse.Namespace) -> int:
    from tools.benchmarks.head import benchmark_head

    shape = (flags.tokens, flags.hidden, flags.vocabulary, flags.chunk_mib)
    for one in benchmark_head(*shape, threads=flags.threads, rounds=flags.rounds):
        print(
            f"{one.implementation}: {one.milliseconds:.0f} ms, {one.saved_mib:.0f} MiB saved for backward, "
            f"{one.peak_mib:.0f} MiB at the peak"
        )
    return 0


def _data(flags: argparse.Namespace) -> int:
    from megalite.data.errors import DataError
    from megalite.data.sample_corpus import train_tokenizer
    from tools.benchmarks.data.corpora import check_texts
    from tools.benchmarks.data.run import benchmark_data, conditions

    for path in (flags.corpus, flags.tokenizer_model):
        if path is not None and not path.is_file():
            print(f"benchmark: error: {path}: no such file", file=sys.stderr)
            return 1
    corpus = flags.corpus.resolve()
    try:
        if "preprocessing" in flags.parts:
            check_texts(flags.corpus)
        with tempfile.TemporaryDirectory() as folder:
            if flags.tokenizer_model is None:
                model = Path(folder) / "tokenizer.json"
                train_tokenizer(corpus, model, 4096)
            else:
                model = flags.tokenizer_model.resolve()
            print(conditions(flags.rounds))
            show = partial(print, flush=True)
            benchmark_data(flags.documents, flags.rounds, corpus, model, flags.parts, show)
    except (DataError, OSError, RuntimeError) as error:
        print(f"benchmark: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
