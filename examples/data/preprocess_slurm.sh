#!/usr/bin/env bash
# Tokenises a corpus on many machines: each task of the array does a share of as many bytes, then one merges them.
#   sbatch --array=0-63 examples/data/preprocess_slurm.sh 64 "corpus/*.jsonl" data/corpus tokenizer.json
#   sbatch --array=3,7 examples/data/preprocess_slurm.sh 64 "corpus/*.jsonl" data/corpus tokenizer.json  # two again
#   sbatch --dependency=afterok:JOB examples/data/preprocess_slurm.sh merge data/corpus text
# Further flags are those of tools/preprocess_data.py, e.g. --json-keys content --on-error skip.
# A task that was killed continues when it is requeued. The merged bytes are those of one run over everything.
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=16
#SBATCH --requeue
set -euo pipefail
shopt -s nullglob extglob

tools=${SLURM_SUBMIT_DIR:-.}/tools # sbatch runs a copy of this script, so the checkout is where it was submitted
python=${PYTHON:-python3}

if [[ $1 == merge ]]; then
    if (($# > 3)); then
        echo "merge takes a prefix and a key, but also got: ${*:4}" >&2
        exit 2
    fi
    prefix=$2 key=${3:-text}
    parts=("$prefix"_part+([0-9])of+([0-9])_"$key"_document.idx)
    if [[ ${#parts[@]} == 0 ]]; then
        echo "no shares to merge: no ${prefix}_partIofN_${key}_document.idx; give the prefix and the key of the tasks" >&2
        exit 1
    fi
    exec "$python" "$tools/merge_datasets.py" --input "${parts[@]%.idx}" --output-prefix "${prefix}_${key}_document"
fi

: "${SLURM_ARRAY_TASK_ID:?is not set: give sbatch --array=0-$(($1 - 1)), a task each share}"
: "${4:?is missing: give the number of shares, the inputs, the output prefix and the tokenizer}"
if [[ ${5:-} == [!-]* ]]; then
    echo "expected flags behind the tokenizer, got $5: put the pattern of the inputs in quotes" >&2
    exit 2
fi
exec "$python" "$tools/preprocess_data.py" --partitions "$1" --input "$2" --output-prefix "$3" --append-eod \
    --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$4" \
    --workers "${SLURM_CPUS_PER_TASK:-$(nproc)}" "${@:5}"
