"""Tokenises a corpus on a Ray cluster: each task does a share of as many bytes, then the driver merges them.

    python examples/data/preprocess_ray.py --partitions 64 --cpus-per-task 16 --input "corpus/*.jsonl" \\
        --output-prefix data/corpus --append-eod --tokenizer-model tokenizer.json

Further flags are those of tools/preprocess_data.py. Inputs, output and this checkout lie on a disk that all
machines see. Ray repeats a task whose machine died, and the repeated task continues where it was. The merged
bytes are those of one run over everything.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

TOOLS = Path(__file__).resolve().parents[2] / "tools"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--partitions", type=int, required=True, help="shares, a task each")
    parser.add_argument("--cpus-per-task", type=int, default=1, help="tokenizer threads of a task")
    parser.add_argument("--address", help="of a running cluster (default: Ray's own choice, or this machine)")
    parser.add_argument("--output-prefix", required=True, help="the datasets are named PREFIX_KEY_document")
    parser.add_argument(
        "--json-keys", nargs="+", default=["text"], help="keys to read, a dataset each (default: text)"
    )
    flags, rest = parser.parse_known_args()
    try:
        import ray
    except ImportError:
        print("preprocess_ray: error: needs the package ray: pip install ray", file=sys.stderr)
        return 1

    prefix = str(Path(flags.output_prefix).resolve())
    command = [sys.executable, str(TOOLS / "preprocess_data.py"), "--output-prefix", prefix]
    command += ["--json-keys", *flags.json_keys, *rest, "--workers", str(flags.cpus_per_task)]
    command += ["--partitions", str(flags.partitions)]
    folder = Path.cwd()

    @ray.remote(num_cpus=flags.cpus_per_task, max_retries=3)
    def share(index: int) -> str:
        """What went wrong, or nothing."""
        done = subprocess.run(
            [*command, "--partition-index", str(index)],
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )
        return f"{done.stderr}ended with code {done.returncode}; " if done.returncode else ""

    ray.init(address=flags.address, log_to_driver=False)
    waiting = {share.remote(index): index for index in range(flags.partitions)}
    while waiting:
        (done,), _ = ray.wait(list(waiting))
        index = waiting.pop(done)
        if error := ray.get(done):
            print(f"share {index}: {error}the same command continues", file=sys.stderr)
            return 1
        print(f"share {index} done, {len(waiting)} to go", flush=True)

    for key in flags.json_keys:
        dataset = f"{key}_document"
        parts = [f"{prefix}_part{i:05}of{flags.partitions:05}_{dataset}" for i in range(flags.partitions)]
        merge = [sys.executable, str(TOOLS / "merge_datasets.py"), "--output-prefix", f"{prefix}_{dataset}"]
        if subprocess.run([*merge, "--input", *parts], check=False).returncode:
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
