#!/usr/bin/env bash
""":"
# Pretrains a GPT. This one file is valid bash and valid Python, so each of these works:
#   bash examples/pretrain_gpt.sh [torchrun flags and training flags, in any order]
#   torchrun --nproc-per-node N examples/pretrain_gpt.sh [training flags]
#   torchrun --no-python --nproc-per-node N examples/pretrain_gpt.sh [training flags]
#   srun bash examples/pretrain_gpt.sh [...]   (one task a node, or one task a GPU)
# --dry-run prints the command that would be run on this node, and stops. PYTHON=... chooses the interpreter.
set -euo pipefail

fail() {
    echo "pretrain_gpt.sh: $*" >&2
    exit 2
}

script=$(readlink -f -- "${BASH_SOURCE[0]}")
root=$(dirname "$(dirname "$script")")
if [[ -z ${PYTHON:-} ]]; then
    PYTHON=python3
    [[ -n ${VIRTUAL_ENV:-} || ! -x $root/.venv/bin/python ]] || PYTHON=$root/.venv/bin/python
fi

# A launcher has already started one process a rank: be that rank.
if [[ -n ${RANK:-} && -n ${LOCAL_RANK:-} && -n ${WORLD_SIZE:-} ]]; then
    exec "$PYTHON" -u "$script" "$@"
fi

# What SLURM's first node is called; MASTER_ADDR overrides it where scontrol is missing (in a container, say).
slurm_master() {
    if [[ -n ${MASTER_ADDR:-} ]]; then
        echo "$MASTER_ADDR"
    elif command -v scontrol >/dev/null; then
        scontrol show hostnames "$SLURM_STEP_NODELIST" | head -n 1
    else
        fail "scontrol is not on PATH; set MASTER_ADDR to the first node of $SLURM_STEP_NODELIST"
    fi
}
# Two jobs, or two steps of one, that share a node must not meet.
slurm_port=$((20000 + (${SLURM_JOB_ID:-0} + 1009 * ${SLURM_STEP_ID:-0}) % 10000))

tasks=${SLURM_STEP_NUM_TASKS:-1}
nodes=${SLURM_STEP_NUM_NODES:-1}
if ((tasks > nodes)); then # srun with one task a GPU: be a rank, no torchrun
    MASTER_ADDR=$(slurm_master)
    export MASTER_ADDR MASTER_PORT=${MASTER_PORT:-$slurm_port}
    export RANK=$SLURM_PROCID WORLD_SIZE=$tasks LOCAL_RANK=$SLURM_LOCALID LOCAL_WORLD_SIZE=$((tasks / nodes))
    exec "$PYTHON" -u "$script" "$@"
fi

nnodes=${PET_NNODES:-$nodes} # PET_*: torchrun's own environment variables
node_rank=${PET_NODE_RANK:-}
nproc=${PET_NPROC_PER_NODE:-}
address_of_all=${PET_RDZV_ENDPOINT:-}${PET_MASTER_ADDR:-}${PET_STANDALONE:-}
rendezvous=$address_of_all
torchrun_flags=" --nnodes --nproc-per-node --node-rank --master-addr --master-port --local-addr --rdzv-backend
 --rdzv-endpoint --rdzv-id --rdzv-conf --max-restarts --monitor-interval --start-method --event-log-handler
 --role --log-dir --redirects -r --tee -t --local-ranks-filter --duplicate-stdout-filters
 --duplicate-stderr-filters --logs-specs --numa-binding --signals-to-handle --shutdown-timeout "
torchrun_flags=${torchrun_flags//$'\n'/ }
dry_run=
print_config=
signals=${PET_SIGNALS_TO_HANDLE:-}
address=${PET_LOCAL_ADDR:-}
restarts=${PET_MAX_RESTARTS:-0}
backend=${PET_RDZV_BACKEND:-}
conf=${PET_RDZV_CONF:-}
id=${PET_RDZV_ID:-}
port=${PET_MASTER_PORT:-${MASTER_PORT:-$slurm_port}}
torchrun=()
training=()
while (($#)); do
    flag=$1
    shift
    name=${flag%%=*}
    name=${name//_/-}
    if [[ $torchrun_flags == *" $name "* ]]; then
        if [[ $flag == *=* ]]; then
            value=${flag#*=}
        elif (($#)); then
            value=$1
            shift
        else
            fail "$flag needs a value"
        fi
    fi
    case $name in
        --dry-run) dry_run=1 ;;
        --standalone | --virtual-local-rank) torchrun+=("$name") ;;
        --nnodes) nnodes=$value ;;
        --node-rank) node_rank=$value ;;
        --nproc-per-node) nproc=$value ;;
        *)
            if [[ $torchrun_flags == *" $name "* ]]; then
                torchrun+=("$name" "$value")
            else
                training+=("$flag")
            fi
            ;;
    esac
    case $name in
        --standalone | --rdzv-endpoint | --master-addr) address_of_all=$name ;;
        --rdzv-backend) backend=$value ;;
        --rdzv-conf) conf=$value ;;
        --rdzv-id) id=$value ;;
        --master-port) port=$value ;;
        --signals-to-handle) signals=$name ;;
        --local-addr) address=$name ;;
        --max-restarts) restarts=$value ;;
        --print-config) print_config=1 ;;
    esac
    case $name in
        --standalone | --rdzv-* | --master-*) rendezvous=$name ;;
    esac
done

most_nodes=${nnodes##*:} # torchrun also takes MIN:MAX
[[ $most_nodes =~ ^[1-9][0-9]*$ ]] || fail "--nnodes $nnodes: not a number of nodes"
if [[ -z ${SLURM_STEP_ID:-} && ${SLURM_JOB_NUM_NODES:-1} -gt 1 && $nnodes == 1 ]]; then
    fail "this job has $SLURM_JOB_NUM_NODES nodes and would use one: start it with srun, one task a node"
fi

# With -m or -c alone Python would import what lies in the folder of the command, as a tokenize.py.
without_here="import sys; sys.path[:] = [folder for folder in sys.path if folder]"
accelerators() {
    "$PYTHON" -c "$without_here
from torch import cuda
print(cuda.device_count() if cuda.is_available() else 0)"
}
cores=$(getconf _NPROCESSORS_ONLN)
case $nproc in
    "") # as many as the default layout can use: 1, 2, 4 or 8
        found=$(accelerators)
        limit=$((found ? found : 8))
        nproc=1
        while ((nproc * 2 <= limit && nproc < 8)); do nproc=$((nproc * 2)); done
        ((nproc == limit)) || echo "pretrain_gpt.sh: using $nproc of $limit devices; see --nproc-per-node" >&2
        ;;
    auto | gpu)
        found=$(accelerators)
        ((found > 0)) || fail "--nproc-per-node $nproc: this machine has no accelerator; give a number"
        nproc=$found
        ;;
    cpu) nproc=$cores ;;
    *) [[ $nproc =~ ^[1-9][0-9]*$ ]] || fail "--nproc-per-node $nproc: give a number, auto, gpu or cpu" ;;
esac
# Processes that share the cores must not each start a thread for every core.
((nproc == 1)) || export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((nproc < cores ? cores / nproc : 1))}

torchrun+=("--nnodes=$nnodes" "--nproc-per-node=$nproc")
if [[ -n ${SLURM_STEP_ID:-} ]] && ((nodes > 1)) && [[ -z $address_of_all ]]; then
    node_rank=${node_rank:-$SLURM_NODEID}
    master=$(slurm_master)
    # With the static one the nodes would not hear of each other's restarts.
    [[ -n $backend ]] || backend=$( ((restarts == 0)) && echo static || echo c10d)
    if [[ $backend == static ]]; then
        torchrun+=("--master-addr=$master" "--master-port=$port")
    else
        is_host=$((node_rank == 0))
        id=${id:-${SLURM_JOB_ID:-0}.$SLURM_STEP_ID}
        torchrun+=("--rdzv-backend=$backend" "--rdzv-endpoint=$master:$port" "--rdzv-id=$id")
        torchrun+=("--rdzv-conf=is_host=$is_host${conf:+,$conf}")
        here=$master
        ((is_host)) || here=${SLURMD_NODENAME:-$(hostname)} # as SLURM names it
        [[ -n $address ]] || torchrun+=("--local-addr=$here")
    fi
elif [[ $nnodes == 1 && -z $rendezvous ]]; then
    torchrun+=(--standalone) # a free port: several runs may share a machine
    [[ -n $address ]] || torchrun+=(--local-addr=127.0.0.1) # its name may be known to nobody
fi
# Or ranks that torchrun starts anew (--max-restarts) would find the addresses of those that have died.
((most_nodes == 1)) || export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
# torchrun would end at the SIGHUP of a closed terminal, also when nohup has it ignored.
if [[ -z $signals && $(trap -p HUP) == "trap -- '' "* ]]; then
    torchrun+=(--signals-to-handle=SIGTERM,SIGINT,SIGQUIT)
fi
[[ -z $node_rank ]] || torchrun+=("--node-rank=$node_rank")

# Who ignores SIGCHLD leaves that to its children, of whose own Python then takes every end for a success.
children="import signal; signal.signal(signal.SIGCHLD, signal.SIG_DFL)"
run="$without_here; $children; sys.argv[0] = 'torchrun'; from torch.distributed.run import main; main()"
command=("$PYTHON" -c "$run" "${torchrun[@]}" "$script" ${training[@]+"${training[@]}"})
if [[ -n $dry_run ]]; then
    printf "%q " "${command[@]}"
    echo
    exit 0
fi
# One cheap process tells of a wrong configuration before any rank exists; of several nodes, the first tells.
exec 3>&2
[[ ${node_rank:-0} == 0 ]] || exec 3>/dev/null
world_size=$((most_nodes * nproc))
"$PYTHON" "$script" --check-for-world-size $world_size ${training[@]+"${training[@]}"} 2>&3
exec 3>&-
[[ -z $print_config ]] || exit 0
exec "${command[@]}"
: <<'# end of the Python part'
":"""

from __future__ import annotations

import os
import sys
from pathlib import Path

CONFIG = Path(__file__).resolve().parent / "configs" / "tiny_llama.yaml"
LAYOUTS = {1: (1, 1), 2: (2, 1), 4: (2, 2), 8: (2, 2)}  # ranks -> tensor, pipeline; the rest is data
SAMPLE = Path("runs/sample/corpus_text_document.idx")  # the recipe's data, from the folder of the command
OTHER_DATA = {"--config", "--mock-data", "--data-path", "--data-args-path", "--train-data-path"}


def with_defaults(flags: list[str], world_size: int) -> list[str]:
    """``flags`` after this script's recipe and layout, which a ``--config`` or a parallel size replaces."""
    given = {flag.split("=")[0] for flag in flags}
    if "--config" in given:
        return flags
    defaults = ["--config", str(CONFIG)]
    if not given & {"--tensor-model-parallel-size", "--pipeline-model-parallel-size"}:
        tensor, pipeline = LAYOUTS.get(world_size, (1 if world_size % 2 else 2, 1))
        defaults += ["--tensor-model-parallel-size", str(tensor)]
        defaults += ["--pipeline-model-parallel-size", str(pipeline)]
    return defaults + flags


def advice(flags: list[str]) -> str:
    """What a newcomer whose run on the recipe's own data was refused must know, or ""."""
    if {flag.split("=")[0] for flag in flags} & OTHER_DATA or SAMPLE.is_file():
        return ""
    return (
        f"The default data is a sample corpus that `make pretrain` puts into {SAMPLE.parent} of its folder; "
        "start from\nthere. Or bring your own text with --data-path, or train on none:\n"
        "  --mock-data --tokenizer-type NullTokenizer --vocab-size 1000"
    )


if __name__ == "__main__":
    flags = sys.argv[1:]
    try:
        if flags[:1] == ["--check-for-world-size"]:
            from megalite.training.preflight import check_before_run

            world_size, flags = flags[1], flags[2:]
            check_before_run(with_defaults(flags, int(world_size)), int(world_size))
            sys.exit()
        from megalite.training.main import main

        world_size = os.environ.get("WORLD_SIZE", "")
        sys.exit(main(with_defaults(flags, int(world_size) if world_size.isdecimal() else 1)))
    except SystemExit as leaving:
        if leaving.code == 2 and os.environ.get("RANK", "0") == "0" and (text := advice(flags)):
            print(text, file=sys.stderr, flush=True)
        raise
# end of the Python part
