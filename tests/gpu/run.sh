#!/usr/bin/env bash
# All that only a GPU can show, unattended, in at most 8 minutes: tests/gpu/run.sh OUTDIR
# Needs an environment with megalite and its test dependencies (PYTHON names its interpreter). Every step runs whatever
# became of the one before; OUTDIR/report.json holds exit codes, seconds and figures, OUTDIR/*.log the full output.
set -u
unset CDPATH # with it cd prints where it went
out=$(mkdir -p "${1:?usage: tests/gpu/run.sh OUTDIR}" && cd "$1" && pwd)
cd "$(dirname "$0")/../.."
python=${PYTHON:-python}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
: >"$out/steps.txt"

step() { # NAME SECONDS COMMAND...: at most SECONDS, output to NAME.log
    local name=$1 limit=$2 begin code
    shift 2
    begin=$(date +%s)
    timeout --kill-after=5 "$limit" "$@" >"$out/$name.log" 2>&1
    code=$?
    echo "$name $code $(($(date +%s) - begin))" | tee -a "$out/steps.txt"
}

step machine 30 bash -c "nvidia-smi || rocm-smi; $python -c 'import torch, triton; print(torch.__version__, triton.__version__, torch.cuda.get_device_name())'"
step kernels 120 "$python" -m pytest tests/kernels/triton_cases -p no:cacheprovider
step gpu 90 "$python" -m pytest tests/gpu -p no:cacheprovider
if command -v compute-sanitizer >/dev/null; then
    step sanitizer 50 compute-sanitizer --tool memcheck --error-exitcode 9 "$python" -m pytest -p no:cacheprovider \
        tests/kernels/triton_cases/test_rms_norm.py -k "test_shapes and 123"
fi
step benchmark 90 "$python" tools/benchmark.py kernels --rounds 20 --compile --output "$out/kernels"
step optimizer 40 "$python" tools/benchmark.py optimizer --parameters 500000000
step training 60 bash examples/pretrain_gpt.sh --mock-data --tokenizer-type NullTokenizer --vocab-size 32000 --bf16 \
    --tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 --num-layers 12 --hidden-size 1024 \
    --num-attention-heads 16 --seq-length 2048 --max-position-embeddings 2048 --micro-batch-size 4 --global-batch-size 8 \
    --train-iters 20 --log-interval 5 --eval-iters 0 --metrics-file "$out/training.jsonl"
exec "$python" tests/gpu/report.py "$out"
