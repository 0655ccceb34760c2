"""Tokenises a corpus on a Ray cluster: each task does a share of as many bytes, then the driver merges them.

    python examples/data/preprocess_ray.py --partitions 64 --cpus-per-task 16 --input "corpus/*.jsonl" \\
        --output-prefix data/corpus --append-eod --tokenizer-model tokenizer.json

Further flags are those of tools/preprocess_data.py. Inputs, output and this checkout lie on a disk that all
machines see. Ray repeats a task whose machine died, and the repeated task continues where it was. The merged
bytes are those of one run over everything.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from megalite.data.settings import path_given
from megalite.flags import Once

TOOLS = Path(__file__).resolve().parents[2] / "tools"
NO_PROGRESS = ["--log-interval", str(10**12)]  # documents between lines


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text}: expected 1 or more")
    return number


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--partitions", type=positive, required=True, help="shares, a task each")
    parser.add_argument("--cpus-per-task", type=positive, default=1, help="tokenizer threads of a task")
    parser.add_argument("--address", help="of a running cluster (default: Ray's own choice, or this machine)")
    parser.add_argument(
        "--output-prefix", type=path_given, required=True, help="the datasets are named PREFIX_KEY_document"
    )
    parser.add_argument(
        "--json-keys",
        nargs="+",
        action=Once,
        default=["text"],
        help="keys to read, a dataset each (default: text)",
    )
    flags, rest = parser.parse_known_args()
    try:
        import ray
    except ImportError:
        return failed("needs the package ray: pip install ray")

    prefix = os.path.join(os.getcwd(), flags.output_prefix)  # a link of its name is left alone
    command = [sys.executable, str(TOOLS / "preprocess_data.py"), "--output-prefix", prefix, *NO_PROGRESS]
    command += ["--json-keys", *flags.json_keys, *rest, "--workers", str(flags.cpus_per_task)]
    command += ["--partitions", str(flags.partitions)]
    folder = Path.cwd()

    @ray.remote(num_cpus=flags.cpus_per_task, max_retries=3)
    def share(index: int) -> tuple[int, str]:
        """The exit code, and what was said."""
        done = subprocess.run(
            [*command, "--partition-index", str(index)],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="backslashreplace",
            check=False,
        )
        return done.returncode, done.stdout

    try:
        ray.init(address=flags.address, log_to_driver=False)
        largest = max(int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"])
        if largest < flags.cpus_per_task:
            lacking = f"--cpus-per-task {flags.cpus_per_task}: the largest machine has {largest} CPUs for Ray"
            if not (flags.address or os.environ.get("RAY_ADDRESS")):
                return failed(f"{lacking}; give as many or fewer")
            print(f"preprocess_ray: {lacking}; waiting for a larger one to join the cluster", flush=True)
        waiting = {share.remote(index): index for index in range(flags.partitions)}
        while waiting:
            (done,), _ = ray.wait(list(waiting))
            index = waiting.pop(done)
            code, said = ray.get(done)
            for line in said.splitlines():
                print(f"share {index}: {line}", file=sys.stderr)
            if code:
                return failed(f"share {index} ended with code {code}; the same command continues")
            print(f"share {index} done, {len(waiting)} to go", flush=True)
    except (ray.exceptions.RayError, ConnectionError) as error:
        return failed(f"Ray: {error}; the same command continues")
    except KeyboardInterrupt:
        return failed("interrupted; the same command continues", 130)

    for key in flags.json_keys:
        dataset = f"{key}_document"
        parts = [f"{prefix}_part{i:05}of{flags.partitions:05}_{dataset}" for i in range(flags.partitions)]
        merge = [sys.executable, str(TOOLS / "merge_datasets.py"), "--output-prefix", f"{prefix}_{dataset}"]
        if subprocess.run([*merge, "--input", *parts], check=False).returncode:
            return 1
    return 0


def failed(message: str, code: int = 1) -> int:
    print(f"preprocess_ray: error: {message}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
