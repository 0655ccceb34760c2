"""Each broken rule gives one message that names flag, value, rule and what would do."""

from __future__ import annotations

import importlib
import math
import os
from pathlib import Path

import pytest

from megalite.config import schedule_file, validate
from megalite.config.settings import replace

from .minimal import errors_of, minimal, parsed

# flags behind the minimal command line, number of processes, the one message that is expected
ONE_ERROR = [
    # sharding
    (
        "--use-distributed-optimizer --zero-stage 0",
        2,
        "--zero-stage 0: contradicts --use-distributed-optimizer, which is stage 1; leave one of the two out",
    ),
    (
        "--zero-stage 2 --pipeline-model-parallel-size 2",
        4,
        "--zero-stage 2: would reduce all gradients in each of the many micro-batches that PP 2 needs; use 1",
    ),
    (
        "--zero-stage 3 --pipeline-model-parallel-size 2",
        4,
        "--zero-stage 3: would reduce all gradients and gather all weights twice in each of the many",
    ),
    ("--zero-stage 4", 2, "--zero-stage 4: must be >= 0 and <= 3"),
    (
        "--overlap-param-gather",
        2,
        "--overlap-param-gather: every rank updates all weights: none are gathered; use --zero-stage 1",
    ),
    (
        "--overlap-param-gather --zero-stage 3",
        2,
        "--overlap-param-gather: stage 3 gathers each layer just ahead of its use anyway; leave it out",
    ),
    (
        "--ddp-num-buckets 4 --ddp-bucket-size 1000",
        2,
        "--ddp-num-buckets 4: contradicts --ddp-bucket-size 1000; leave one of the two out",
    ),
    (
        "--grad-reduce-in-bf16 --fp16",
        2,
        "--grad-reduce-in-bf16: would round gradients of float16 weights; add --bf16, or leave it out",
    ),
    # layout
    (
        "--tensor-model-parallel-size 8",
        8,
        "--num-attention-heads 12: 12 heads not divisible by TP 8; valid TP: 1,2,3,4,6,12",
    ),
    (
        "--tensor-model-parallel-size 4 --group-query-attention --num-query-groups 6",
        4,
        "--num-query-groups 6: 6 query groups not divisible by TP 4, nor TP by them; valid TP: 1,2,3,6,12",
    ),
    (
        "--tensor-model-parallel-size 6 --group-query-attention --num-query-groups 4",
        6,
        "--num-query-groups 4: 4 query groups not divisible by TP 6, nor TP by them; valid TP: 1,2,4,12",
    ),
    (
        "--tensor-model-parallel-size 4 --ffn-hidden-size 90",
        4,
        "--ffn-hidden-size 90: MLP width 90 not divisible by TP 4; nearest: 88 or 92",
    ),
    (
        "--num-layers 30 --pipeline-model-parallel-size 4 --global-batch-size 8",
        4,
        "--num-layers 30: 30 layers not divisible by PP 4; valid PP: 1,2,3,5,6,10,15,30; or 28 or 32 layers",
    ),
    (
        "--global-batch-size 30",
        4,
        "--global-batch-size 30: 30 samples not divisible by micro-batch 2 x DP 4 = 8; nearest: 24 or 32",
    ),
    ("--global-batch-size 3", 4, "nearest: 8"),
    (
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2",
        6,
        "--tensor-model-parallel-size 2: 6 processes not divisible by TP 2 x PP 2 = 4; start 4 or 8",
    ),
    ("--pipeline-model-parallel-size 4", 2, "--pipeline-model-parallel-size 4: 2 processes not divisible"),
    ("--sequence-parallel", 1, "--sequence-parallel: needs TP > 1"),
    (
        "--sequence-parallel --tensor-model-parallel-size 2 --seq-length 31",
        2,
        "--seq-length 31: 31 tokens not divisible by TP 2, as --sequence-parallel needs; nearest: 30 or 32",
    ),
    (
        "--cross-entropy-fusion-impl linear",
        1,
        "linear: would be ignored by Megatron without --cross-entropy-loss-fusion",
    ),
    (
        "--cross-entropy-loss-fusion --cross-entropy-fusion-impl te",
        1,
        "--cross-entropy-fusion-impl te: ",
    ),
    ("--label-smoothing 1", 1, "--label-smoothing 1"),
    (
        "--position-embedding-type yarn --yarn-rotary-scaling-factor 4",
        1,
        "--yarn-original-max-position-embeddings: is required with --position-embedding-type yarn",
    ),
    (
        "--position-embedding-type yarn --yarn-rotary-scaling-factor 4 --use-rope-scaling "
        "--yarn-original-max-position-embeddings 16",
        1,
        "--use-rope-scaling: is Llama 3's scaling, and --position-embedding-type yarn another",
    ),
    (
        "--position-embedding-type yarn --yarn-rotary-scaling-factor 4 --yarn-beta-slow 40 "
        "--yarn-original-max-position-embeddings 16",
        1,
        "--yarn-beta-fast 32: must be more than --yarn-beta-slow 40",
    ),
    (
        "--tp-comm-overlap --tensor-model-parallel-size 2",
        2,
        "--tp-comm-overlap: cuts communication by the shards of --sequence-parallel, which is off; add",
    ),
    ("--pipeline-schedule interleaved", 1, "--pipeline-schedule interleaved: interleaved needs PP > 1"),
    ("--pipeline-schedule zbv", 1, "--pipeline-schedule zbv: zbv needs PP > 1"),
    (
        "--pipeline-model-parallel-size 2 --num-layers 6 --pipeline-schedule zbv",
        2,
        "--num-layers 6: 6 layers not divisible by PP 2 x 2 chunks; valid PP: 1,2,3,6; or 4 or 8 layers",
    ),
    (
        "--pipeline-model-parallel-size 2 --pipeline-schedule zb-h1 --num-virtual-stages-per-pipeline-rank 2",
        2,
        "--num-virtual-stages-per-pipeline-rank 2: is for the interleaved schedule, not zb-h1",
    ),
    (
        "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 "
        "--num-layers-per-virtual-pipeline-stage 1",
        2,
        "--num-layers-per-virtual-pipeline-stage 1: says with another flag how many chunks there are",
    ),
    (
        "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 "
        "--microbatch-group-size-per-virtual-pipeline-stage 1",
        2,
        "--microbatch-group-size-per-virtual-pipeline-stage 1: is smaller than PP 2",
    ),
    (
        "--decoder-last-pipeline-num-layers 1",
        1,
        "--decoder-last-pipeline-num-layers 1: needs PP > 1; leave it out: one stage holds all layers",
    ),
    (
        "--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 1 "
        "--decoder-last-pipeline-num-layers 1",
        2,
        "4 layers do not come out even over 2 stages",
    ),
    (
        "--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 1 --pipeline-schedule zbv",
        2,
        "--decoder-first-pipeline-num-layers 1: is not for several chunks a rank",
    ),
    (
        "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Ett|tL",
        2,
        "--pipeline-model-parallel-layout Ett|tL: its stages hold 3 layers (2,1), the model has 4; write 4 t",
    ),
    (
        "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Ett|t|tL",
        2,
        "--pipeline-model-parallel-layout Ett|t|tL: 3 stages not divisible by PP 2; nearest: 2 or 4 stages",
    ),
    (
        "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout E(tt|tL",
        2,
        "--pipeline-model-parallel-layout E(tt|tL: a parenthesis is not closed; such as Ettt|t*2|tL",
    ),
    (
        "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout E(t|)*3tL "
        "--pipeline-schedule gpipe",
        2,
        "E(t|)*3tL: its 4 stages are 2 chunks a rank, and gpipe has 1; write 2",
    ),
    (
        "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Ett|ttL --pipeline-schedule zbv",
        2,
        "--pipeline-model-parallel-layout Ett|ttL: its 2 stages are 1 chunks a rank, and zbv has 2; write 4",
    ),
    (
        "--pipeline-model-parallel-layout Ett|ttL",
        1,
        "--pipeline-model-parallel-layout Ett|ttL: interleaved needs PP > 1; write one stage",
    ),
    (
        "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et|tttL "
        "--decoder-first-pipeline-num-layers 1",
        2,
        "--decoder-first-pipeline-num-layers 1: is said by --pipeline-model-parallel-layout too; leave",
    ),
    (
        "--pipeline-model-parallel-size 4 --pipeline-model-parallel-layout Ett||tt|L --global-batch-size 8",
        4,
        "--pipeline-model-parallel-layout Ett||tt|L: pipeline rank 1 would hold nothing; give it a layer",
    ),
    ("--global-batch-size 30 --decrease-batch-size-if-needed --micro-batch-size 16", 2, "nearest: 32"),
    (
        "--global-batch-size 16 --rampup-batch-size 4 4 24",
        1,
        "--rampup-batch-size 4 4 24: a batch that changes needs a length in samples; give --train-samples",
    ),
    # model
    ("--hidden-size 50", 1, "--hidden-size 50: hidden size 50 not divisible by 12 heads; nearest: 48 or 60"),
    ("--seq-length 64", 1, "--max-position-embeddings 32: 32 positions are fewer than the 64 tokens"),
    (
        "--group-query-attention --num-query-groups 5",
        1,
        "--num-query-groups 5: 12 heads not divisible by 5 query groups; valid groups: 1,2,3,4,6,12",
    ),
    ("--num-query-groups 4", 1, "would be ignored by Megatron without --group-query-attention"),
    (
        "--gradient-accumulation-fusion-impl apex",
        1,
        "--gradient-accumulation-fusion-impl apex: NVIDIA apex's module fused_weight_gradient_mlp_cuda is "
        "not installed; native",
    ),
    (
        "--gradient-accumulation-fusion-impl apex --no-gradient-accumulation-fusion",
        1,
        "--gradient-accumulation-fusion-impl apex: is switched off by --no-gradient-accumulation-fusion",
    ),
    ("--position-embedding-type rope --kv-channels 5", 1, "rope rotates pairs, and 5 of the 5 channels"),
    ("--position-embedding-type rope --rotary-percent 0.25", 1, "and 1 of the 4 channels of a head"),
    ("--null-tokenizer-eod-id 100", 1, "--null-tokenizer-eod-id 100: not in the vocabulary of 100 tokens"),
    ("--hidden-dropout 1", 1, "--hidden-dropout 1: must be >= 0 and < 1"),
    (
        "--attention-dropout 0.1 --reset-attention-mask",
        1,
        "--attention-dropout 0.1: is not available with --reset-attention-mask",
    ),
    ("--attention-dropout 1", 1, "--attention-dropout 1: must be >= 0 and < 1"),
    ("--swiglu --hidden-size 12", 1, "--ffn-hidden-size: the default MLP width of --swiglu rounds to 0"),
    # length and schedule
    ("--min-lr 0.01", 1, "--min-lr 0.01: above the peak learning rate --lr 0.001; at most 0.001"),
    ("--lr-warmup-init 1", 1, "--lr-warmup-init 1: above the peak"),
    (
        "--lr-warmup-iters 10",
        1,
        "--lr-warmup-iters 10: the warm-up is not shorter than the decay of 10 steps",
    ),
    (
        "--lr-warmup-samples 4",
        1,
        "--lr-warmup-samples 4: does not go with --train-iters; use --lr-warmup-iters",
    ),
    ("--lr-decay-style WSD", 1, "--lr-wsd-decay-iters: is required with --lr-decay-style WSD"),
    ("--lr-decay-style WSD --lr-wsd-decay-iters 11", 1, "longer than the 10 steps between warm-up and end"),
    ("--train-samples 100", 1, "--train-iters: contradicts --train-samples; give one of the two"),
    (
        "--lr-warmup-fraction 0.1 --lr-warmup-iters 1",
        1,
        "--lr-warmup-fraction: contradicts --lr-warmup-iters",
    ),
    # the optimizer's formats and places
    (
        "--bf16 --exp-avg-dtype bf16",
        1,
        "--exp-avg-dtype bf16: needs --use-precision-aware-optimizer, as in Megatron; add it, or leave",
    ),
    (
        "--use-precision-aware-optimizer --main-grads-dtype bf16",
        1,
        "--main-grads-dtype bf16: does not go with float32 weights; fp32, or --bf16 weights",
    ),
    (
        "--params-dtype float64 --use-precision-aware-optimizer --exp-avg-sq-dtype bf16",
        1,
        "--exp-avg-sq-dtype bf16: fp64 weights have an fp64 optimizer; fp32, which then stands for fp64",
    ),
    ("--bf16 --use-precision-aware-optimizer --exp-avg-dtype fp8", 1, "bf16 is the narrowest;"),
    ("--main-params-dtype fp16", 1, "by --store-param-remainders;"),
    (
        "--optimizer-impl apex",
        1,
        "--optimizer-impl apex: NVIDIA's apex with its CUDA extensions is not installed (no module amp_C)",
    ),
    ("--optimizer-cpu-offload --optimizer-offload-fraction 1.5", 1, "--optimizer-offload-fraction 1.5"),
    # numbers
    ("--lr nan", 1, "--lr nan: not a finite number"),
    ("--weight-decay inf", 1, "--weight-decay inf: not a finite number"),
    ("--lr 0", 1, "--lr 0: must be > 0"),
    ("--lr -1e-4", 1, "--lr -0.0001: must be > 0"),
    ("--num-layers 0", 1, "--num-layers 0: must be >= 1"),
    ("--num-layers -2", 1, "--num-layers -2: must be >= 1"),
    ("--num-layers four", 1, "--num-layers four: not a whole number; give a whole number >= 1"),
    ("--num-layers 2.5", 1, "--num-layers 2.5: not a whole number"),
    ("--num-layers", 1, "--num-layers: needs a value; give a whole number >= 1"),
    ("--data-path", 1, "--data-path: needs a value"),
    ("--adam-beta1 1", 1, "--adam-beta1 1: must be >= 0 and < 1"),
    ("--adam-beta2 1.5", 1, "--adam-beta2 1.5: must be >= 0 and < 1"),
    ("--adam-eps 0", 1, "--adam-eps 0: must be > 0 and <= 1.7014118e+38"),
    (
        "--adam-eps 1e-300",
        1,
        "--adam-eps 1e-300: is lost in fp32, which it is used in; at least 1.1754944e-38",
    ),
    ("--bf16 --norm-epsilon 1e-39", 1, "--norm-epsilon 1e-39: is lost in fp32"),
    ("--clip-grad -1", 1, "--clip-grad -1: must be >= 0"),
    ("--eval-interval 0", 1, "--eval-interval 0: must be >= 1"),
    ("--seed -1", 1, "--seed -1: must be >= 0 and <= 4294967295"),
    ("--normalization RMSnorm", 1, "no such choice; did you mean RMSNorm? choose from LayerNorm, RMSNorm"),
    (
        "--distributed-backend mpi",
        1,
        "--distributed-backend mpi: no such choice; choose from auto, nccl, gloo",
    ),
    ("--tokenizer-type MultimodalTokenizer", 1, "megalite trains on text; choose from"),
    ("--tiktoken-num-special-tokens 6", 1, "--tiktoken-num-special-tokens 6: must be >= 7"),
    # precision
    ("--bf16 --fp16", 1, "--fp16: contradicts --bf16"),
    ("--bf16 --params-dtype float64", 1, "--bf16: contradicts --params-dtype float64"),
    (
        "--fp16 --initial-loss-scale 4 --min-loss-scale 8",
        1,
        "--min-loss-scale 8: above --initial-loss-scale 4",
    ),
    ("--fp16 --loss-scale-window 0", 1, "--loss-scale-window 0: must be >= 1"),
    (
        "--fp16 --initial-loss-scale 1e300",
        1,
        "--initial-loss-scale 1e+300: must be >= 1.1754944e-38 and <= 1.7014118e+38",
    ),
    ("--fp16 --loss-scale 1e39", 1, "--loss-scale 1e+39: must be >= 1.1754944e-38 and <= 1.7014118e+38"),
    ("--fp16 --min-loss-scale 1e-40", 1, "--min-loss-scale 1e-40: must be >= 1.1754944e-38"),
    # numbers that nothing could hold
    ("--train-iters 1e20", 1, "--train-iters 100000000000000000000: must be >= 1 and <= 2147483647"),
    ("--eval-iters 1e12", 1, "--eval-iters 1000000000000: must be >= 0 and <= 2147483647"),
    ("--global-batch-size 2e12", 1, "--global-batch-size 2000000000000: must be >= 1 and <= 16777216"),
    ("--micro-batch-size 2e12", 1, "--micro-batch-size 2000000000000: must be >= 1 and <= 16777216"),
    ("--vocab-size 1e11", 1, "--vocab-size 100000000000: must be >= 1 and <= 2147483647"),
    ("--hidden-size 4e6", 1, "--hidden-size 4000000: must be >= 1 and <= 1048576"),
    ("--num-layers 1e12", 1, "--num-layers 1000000000000: must be >= 1 and <= 65536"),
    (
        "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 1e10",
        2,
        "--num-virtual-stages-per-pipeline-rank 10000000000: must be >= 1 and <= 65536",
    ),
    ("--num-attention-heads 1e18", 1, "--num-attention-heads 1000000000000000000: must be >= 1"),
    ("--distributed-timeout-minutes 1e9", 1, "--distributed-timeout-minutes 1000000000: must be >= 1 and <="),
    ("--log-interval 1e19", 1, "--log-interval 10000000000000000000: does not fit into 64 bits"),
    ("--save=", 1, '--save "": is empty; give text, or leave it out'),
    (f"--log-interval 1{'0' * 400}", 1, "does not fit into 64 bits"),  # nor into a float
    ("--num-workers 100000", 1, "--num-workers 100000: must be >= 0 and <= 1024"),
    (
        "--eval-iters 2e9 --eval-interval 1 --train-iters 2e9 --global-batch-size 2",
        1,
        "--eval-iters 2000000000: 8000000004000000000 samples of 32 tokens in the whole run are too many "
        "to be counted in 64 bits; at most 72057594",
    ),
    # activations
    (
        "--recompute-granularity full --recompute-num-layers 1",
        1,
        "--recompute-method: is required with --recompute-granularity full; every layer",
    ),
    ("--recompute-granularity full --recompute-method block", 1, "--recompute-num-layers: is required with"),
    ("--recompute-method uniform", 1, "--recompute-method uniform: is for --recompute-granularity full"),
    (
        "--recompute-granularity full --recompute-method block --recompute-num-layers 3 "
        "--pipeline-model-parallel-size 2",
        2,
        "--recompute-num-layers 3: more than the 2 layers of a pipeline chunk; at most 2",
    ),
    ("--cpu-offloading-num-layers 5", 1, "more than the 4 layers of a pipeline chunk; at most 4"),
    ("--recompute-modules norm", 1, "--recompute-modules norm: is for --recompute-granularity selective"),
    (
        "--recompute-activations --recompute-modules layernorm",
        1,
        "--recompute-modules layernorm: no such part; norm is its name here",
    ),
    ("--recompute-activations --recompute-modules mlp_acts", 1, "no such part; did you mean mlp_act?"),
    ("--recompute-activations --recompute-modules moe", 1, "no such part; choose from core_attn, norm"),
    (
        "--recompute-activations --recompute-modules attn core_attn norm",
        1,
        "attn contains core_attn; recompute is not nested; leave out attn, or core_attn",
    ),
    ("--recompute-activations --recompute-modules mlp mlp_act", 1, "mlp contains mlp_act"),
    ("--recompute-activations --recompute-modules rope", 1, "rope: the model has no rotary positions"),
    (
        "--recompute-activations --recompute-modules logits --cross-entropy-loss-fusion "
        "--cross-entropy-fusion-impl linear",
        1,
        "--recompute-modules logits: --cross-entropy-fusion-impl linear never holds all logits",
    ),
    (
        "--recompute-budget 0.5 --recompute-granularity full --recompute-method uniform "
        "--recompute-num-layers 1",
        1,
        "--recompute-budget 0.5: chooses parts, but --recompute-granularity full makes whole layers again",
    ),
    (
        "--recompute-budget 0.5 --recompute-activations --recompute-modules norm",
        1,
        "--recompute-budget 0.5: chooses the parts, which --recompute-modules names too",
    ),
    ("--recompute-budget 1.5", 1, "--recompute-budget 1.5: must be > 0 and <= 1"),
    ("--distribute-saved-activations --tensor-model-parallel-size 2", 2, "true: is for --recompute"),
    (
        "--distribute-saved-activations --recompute-granularity full --recompute-method uniform "
        "--recompute-num-layers 1",
        1,
        "--distribute-saved-activations true: needs TP > 1",
    ),
    (
        "--distribute-saved-activations --recompute-granularity full --recompute-method uniform "
        "--recompute-num-layers 1 --tensor-model-parallel-size 2 --sequence-parallel",
        2,
        "--sequence-parallel cuts activations already",
    ),
    (
        "--distribute-saved-activations --recompute-granularity full --recompute-method uniform "
        "--recompute-num-layers 1 --tensor-model-parallel-size 4 --seq-length 30",
        4,
        "30 tokens not divisible by TP 4; leave it out; nearest --seq-length: 28 or 32",
    ),
    # checkpoints and data
    ("--save-interval 5", 1, "--save-interval 5: nothing is saved without --save"),
    ("--finetune", 1, "--finetune: there is nothing to load without --load"),
    ("--no-load-optim", 1, "--no-load-optim: there is nothing to load without --load"),
    (
        "--load nowhere --exit-on-missing-checkpoint",
        1,
        "--load nowhere: holds no checkpoint, which --exit-on-missing-checkpoint needs",
    ),
    ("--load nowhere --finetune", 1, "--load nowhere: holds no checkpoint, which --finetune needs"),
    ("--split 1,x", 1, "--split 1,x: not numbers with commas between; three shares, e.g. 969, 30, 1"),
    ("--split 0,0,0", 1, "--split 0,0,0: shares must be finite, also their sum, >= 0 and not all 0"),
    ("--split 1e308,1e308,0", 1, "shares must be finite, also their sum"),
    ("--split 1,2,3,4", 1, "--split 1,2,3,4: 4 shares"),
    ("--data-path nowhere/text", 1, "--mock-data: contradicts --data-path"),
]


@pytest.mark.parametrize(
    ("flags", "world_size", "message"), ONE_ERROR, ids=[row[0] or "-" for row in ONE_ERROR]
)
def test_a_broken_rule_is_one_message(flags: str, world_size: int, message: str) -> None:
    found = errors_of(minimal(flags), world_size)
    assert [message in error for error in found] == [True], found


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--num-layers", "--num-layers: is required"),
        ("--hidden-size", "--hidden-size: is required"),
        ("--num-attention-heads", "--num-attention-heads: is required"),
        ("--seq-length", "--seq-length: is required"),
        ("--max-position-embeddings", "--max-position-embeddings: is required"),
        ("--micro-batch-size", "--micro-batch-size: is required"),
        ("--lr", "--lr: is required"),
        ("--train-iters", "the length of the run is missing; give --train-iters or --train-samples"),
        ("--mock-data", "--data-path: there is no data to train on; give --data-path PREFIX, or --mock-data"),
        ("--vocab-size", "--vocab-size: is required with NullTokenizer"),
    ],
)
def test_what_is_missing_is_named(flag: str, message: str) -> None:
    found = errors_of(minimal(without=flag))
    assert [message in error for error in found] == [True], found


def test_all_errors_come_at_once() -> None:
    layout = "--tensor-model-parallel-size 8 --pipeline-model-parallel-size 3"
    flags = f"{layout} --lr nan --bf16 --fp16 --foo --seq-length 64"
    text = "\n".join(errors_of(minimal(flags), 8))
    for part in ("TP 8 x PP 3", "12 heads", "PP 3; valid", "--lr nan", "--fp16", "--foo", "32 positions"):
        assert part in text


def test_a_setting_without_a_usable_value_breaks_no_second_rule() -> None:
    assert len(errors_of(minimal("--num-attention-heads none --tensor-model-parallel-size 8"), 8)) == 1


def test_too_many_heads_for_the_width() -> None:
    assert "--num-attention-heads 64: more heads than hidden channels (48); at most 48" in errors_of(
        minimal("--num-attention-heads 64")
    )


def test_train_samples_below_one_global_batch() -> None:
    found = errors_of(minimal("--train-samples 3 --global-batch-size 4", without="--train-iters"))
    assert found == ["--train-samples 3: less than one global batch of 4; at least 4"]


def test_more_training_tokens_than_can_be_counted() -> None:
    most = (2**63 - 1) // 32
    assert parsed(f"--train-samples {most}", without="--train-iters").batch.train_samples == most
    (found,) = errors_of(minimal(f"--train-samples {most + 1}", without="--train-iters"))
    assert found.endswith(f"are too many to be counted in 64 bits; at most {most}")


def test_fp64_takes_an_epsilon_that_fp32_would_lose() -> None:
    assert parsed("--params-dtype float64 --adam-eps 1e-300").optimizer.adam_eps == 1e-300


def test_the_bounds_of_fp32_are_taken_as_they_are_printed() -> None:
    assert parsed("--fp16 --initial-loss-scale 1.7014118e38 --min-loss-scale 1.1754944e-38")
    assert parsed("--adam-eps 1.1754944e-38")


def test_tensorboard_must_be_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder called tensorboard, which may be the one that is given, is not the package."""
    board = tmp_path / "tensorboard"
    board.mkdir()
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    assert errors_of(minimal(f"--tensorboard-dir {board}")) == [
        f"--tensorboard-dir {board}: the tensorboard package is not installed; pip install tensorboard"
    ]
    (board / "__init__.py").write_text("raise SystemExit('imported')")
    importlib.invalidate_caches()
    assert parsed(f"--tensorboard-dir {board}").logging.tensorboard_dir == str(board)


def test_step_lengths_do_not_go_with_train_samples() -> None:
    found = errors_of(minimal("--train-samples 30 --lr-decay-iters 5", without="--train-iters"))
    assert found == ["--lr-decay-iters 5: does not go with --train-samples; use --lr-decay-samples"]


def test_no_process_is_an_error() -> None:
    assert errors_of(minimal(), 0) == ["--world-size 0: must be >= 1"]


def write_dataset(prefix: Path) -> str:
    for suffix in (".idx", ".bin"):
        Path(f"{prefix}{suffix}").touch()
    return str(prefix)


def test_missing_datasets_are_named(tmp_path: Path) -> None:
    there = write_dataset(tmp_path / "there")
    gone = tmp_path / "gone"
    flags = {
        f"{there}": None,
        f"0.3 {there} 0.7 {there}": None,
        f"{gone}": f"{gone}: no such file: {gone}.idx and {gone}.bin; in {tmp_path} there is there",
        f"1 {there} 2 {gone}": f"no such file: {gone}.idx and {gone}.bin",
        f"{gone}/a": f"the folder {gone} does not exist",
        f"{there}.idx/a": f"the folder {there}.idx cannot be read",
        f"{there}.bin": f"leave the suffix out: {there}",
        f"1 {there} x {there}": "'x' stands where a weight is expected",
        f"1 {there} -2 {there}": "weights must be finite and >= 0",
        f"0 {there} 0 {there}": "at least one weight must be > 0",
    }
    for data, message in flags.items():
        argv = [*minimal(without="--mock-data"), "--data-path", *data.split()]
        if message is None:
            assert not validate(parsed(f"--data-path {data}", without="--mock-data"), 1)
        else:
            assert [message in error for error in errors_of(argv)] == [True], errors_of(argv)


def test_a_data_args_file_is_read(tmp_path: Path) -> None:
    there = write_dataset(tmp_path / "there")
    listing = tmp_path / "blend.txt"
    listing.write_text(f"0.5 {there}\n0.5 {tmp_path}/gone\n")
    found = errors_of(minimal(f"--data-args-path {listing}", without="--mock-data"))
    assert len(found) == 1
    assert "gone.idx" in found[0]
    assert "cannot be read" in errors_of(minimal("--data-args-path nowhere", without="--mock-data"))[0]


def test_pipes_and_devices_are_no_files(tmp_path: Path) -> None:
    """Opening a pipe waits for whoever writes to it."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    tables = "--pipeline-model-parallel-size 2 --global-batch-size 4 --pipeline-schedule-csv"
    for flag, without in (("--data-args-path", "--mock-data"), ("--config", ""), (tables, "")):
        for given in (str(pipe), "/dev/zero"):
            found = errors_of(minimal(f"{flag} {given}", without=without), 2)
            assert any("cannot be read: is a pipe or a device, not a file" in error for error in found), found
    for suffix in ("idx", "bin"):
        os.mkfifo(tmp_path / f"d.{suffix}")
    found = errors_of(minimal(f"--data-path {tmp_path}/d", without="--mock-data"))
    assert found[0].startswith(f"--data-path {tmp_path}/d: is a pipe or a device, not a file: "), found


FLAGS_OF_PATHS = (
    "save",
    "load",
    "data-cache-path",
    "metrics-file",
    "tensorboard-dir",
    "config",
    "tokenizer-model",
)


@pytest.mark.parametrize("flag", [*FLAGS_OF_PATHS, "data-path", "data-args-path", "vocab-file"])
def test_what_the_system_says_nothing_of(flag: str, tmp_path: Path) -> None:
    """As of a whole blend in quotes, or of what lies in a folder that may not be entered."""
    given = tmp_path / ("x" * 300)
    tokenizer = {"tokenizer-model": "HuggingFaceTokenizer", "vocab-file": "GPT2BPETokenizer"}
    more = f"--tokenizer-type {tokenizer[flag]} --merge-file x" if flag in tokenizer else ""
    without = "--tokenizer-type --vocab-size" if flag in tokenizer else ""
    found = errors_of(
        minimal(f"--{flag} {given} {more}", f"--mock-data {without}" if "data-" in flag else without)
    )
    assert any(f"--{flag} {given}: " in error and "File name too long" in error for error in found), found


def test_a_nul_in_a_list_of_datasets(tmp_path: Path) -> None:
    listed = tmp_path / "list.txt"
    listed.write_text("A\0B")
    found = errors_of(minimal(f"--data-args-path {listed}", "--mock-data"))
    assert any("embedded null byte" in error for error in found), found


def test_per_split_paths_need_the_training_one(tmp_path: Path) -> None:
    there = write_dataset(tmp_path / "there")
    found = errors_of(minimal(f"--valid-data-path {there}", without="--mock-data"))
    assert found == ["--train-data-path: is missing beside the other splits' paths; give it too"]


def test_folders_that_cannot_be_made_are_named(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for flag in ("--save", "--tensorboard-dir", "--data-cache-path"):
        assert errors_of(minimal(f"{flag} {file}/below"))[0].startswith(
            f"{flag} {file}/below: {file} is a file"
        )
    assert "is a folder; give a file" in errors_of(minimal(f"--metrics-file {tmp_path}"))[0]
    assert parsed(f"--metrics-file {tmp_path}/new/metrics.jsonl").logging.metrics_file
    os.mkfifo(tmp_path / "pipe")
    assert "is a pipe that nobody reads" in errors_of(minimal(f"--metrics-file {tmp_path}/pipe"))[0]
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    assert parsed(f"--metrics-file {tmp_path}/pipe").logging.metrics_file
    os.close(reader)
    for flag in ("--save", "--metrics-file"):
        assert (
            f"{flag} s3://bucket/run: is an address; give a path"
            in errors_of(minimal(f"{flag} s3://bucket/run"))[0]
        )


def test_a_checkpoint_in_the_place_of_its_folder(tmp_path: Path) -> None:
    (tmp_path / "iter_0000004").mkdir()
    assert parsed(f"--load {tmp_path}/iter_0000004").checkpoint.load
    (tmp_path / "iter_0000004" / "manifest.json").touch()
    (error,) = errors_of(minimal(f"--load {tmp_path}/iter_0000004"))
    assert f"is a checkpoint itself; give its folder, {tmp_path}" in error


def test_a_checkpoint_that_is_there_is_accepted(tmp_path: Path) -> None:
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("10")
    assert parsed(f"--load {tmp_path} --finetune --exit-on-missing-checkpoint").checkpoint.finetune


def test_validate_judges_a_configuration_made_in_code() -> None:
    config = replace(parsed(), num_layers=3, pipeline_model_parallel_size=2, lr=math.inf, loss_scale=-1.0)
    found = [str(error) for error in validate(config, 2)]
    assert len(found) == 3
    assert validate(parsed(), 1) == []


def write_table(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


TABLE = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"


@pytest.mark.parametrize(
    ("text", "flags", "message"),
    [
        (
            TABLE,
            "--global-batch-size 8",
            "is for 2 micro-batches a step, and there are 4; set --global-batch-size 4",
        ),
        (TABLE.replace("1F0", "1X0"), "", "line 2: cell '1X0' is not <stage><F, B, I or W><micro-batch>"),
        ("\n", "", "holds no actions"),
        ("0F0,0B0\n1F0,1B0\n2F0,2B0\n", "--num-layers 6", "has 3 lines, one a rank, and PP is 2"),
        (TABLE + "2F0\n", "--num-layers 6", "has 3 lines, one a rank, and PP is 2"),
        (
            TABLE.replace("1F", "2F").replace("1B", "2B"),
            "",
            "4 layers do not come out even over 3 stages of the table; 3 or 6 layers",
        ),
        (TABLE, "--pipeline-model-parallel-layout Et|t|ttL", "has 3 stages, the table 2"),
        (TABLE, "--num-virtual-stages-per-pipeline-rank 2", "is said by --pipeline-schedule-csv too"),
        (TABLE, "--pipeline-schedule 1f1b", "--pipeline-schedule: contradicts --pipeline-schedule-csv"),
    ],
)
def test_a_pipeline_table_must_fit_the_run(tmp_path: Path, text: str, flags: str, message: str) -> None:
    table = write_table(tmp_path / "table.csv", text)
    argv = f"--pipeline-model-parallel-size 2 --global-batch-size 4 --pipeline-schedule-csv {table} {flags}"
    found = errors_of(minimal(argv), 2)
    assert any(message in error for error in found), found


def test_a_pipeline_table_that_fits_and_one_that_is_not_there(tmp_path: Path) -> None:
    flags = "--pipeline-model-parallel-size 2 --global-batch-size 4 --pipeline-schedule-csv"
    assert parsed(f"{flags} {write_table(tmp_path / 'table.csv', TABLE)}", 2)
    assert (
        f"{tmp_path}/gone.csv cannot be read: No such file"
        in errors_of(minimal(f"{flags} {tmp_path}/gone.csv"), 2)[0]
    )


def test_a_pipeline_table_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule_file, "MOST_ACTIONS", 7)
    table = write_table(tmp_path / "table.csv", TABLE)
    with pytest.raises(ValueError, match="holds 8 actions; at most 7 are read"):
        schedule_file.read_schedule_file(table)
    monkeypatch.setattr(schedule_file, "MOST_BYTES", 10)
    with pytest.raises(ValueError, match="has more than 0 MiB"):
        schedule_file.read_schedule_file(table)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--global-batch-size 16 --rampup-batch-size 4 5 24", "increments of 5 do not lead from 4 to"),
        (
            "--global-batch-size 16 --rampup-batch-size 3 1 24",
            "3 samples not divisible by micro-batch 2 x DP 1",
        ),
        ("--global-batch-size 16 --rampup-batch-size 4 4", "it takes three numbers"),
        ("--step-batch-size-schedule 0:4,64:7", "--global-batch-size 7: 7 samples not divisible by"),
        (
            "--step-batch-size-schedule 0:3,64:8",
            "--step-batch-size-schedule 0:3,64:8: 3 samples not divisible",
        ),
        ("--step-batch-size-schedule 64:8", "the first size must hold from 0 tokens on; such as"),
        (
            "--step-batch-size-schedule 0:4,64:8 --global-batch-size 16",
            "ends with 8, not with --global-batch-size 16; leave --global-batch-size out",
        ),
        ("--step-batch-size-schedule 0:4,64:99999998", "has a batch above 16777216 samples"),
        ("--global-batch-size 16 --rampup-batch-size 4 4 1e300", "does not fit into 64 bits"),
        (
            "--global-batch-size 16 --rampup-batch-size 4 4 24 --step-batch-size-schedule 0:8",
            "--rampup-batch-size: contradicts --step-batch-size-schedule",
        ),
    ],
)
def test_batch_schedules_that_cannot_be_run(flags: str, message: str) -> None:
    found = errors_of(minimal(f"--train-samples 100 {flags}", without="--train-iters"))
    assert any(message in error for error in found), found


def test_batch_schedules_that_can_be_run() -> None:
    stepped = parsed("--train-samples 100 --step-batch-size-schedule 0:4,64:8", without="--train-iters")
    assert stepped.batch.global_batch_size == 8
    ramp = parsed(
        "--train-samples 100 --global-batch-size 16 --rampup-batch-size 4 4 24", without="--train-iters"
    )
    assert ramp.batch.rampup_batch_size == (4, 4, 24)
    assert parsed("--global-batch-size 15 --decrease-batch-size-if-needed", world_size=2)


def test_a_pipeline_table_does_not_go_with_a_batch_that_changes(tmp_path: Path) -> None:
    table = write_table(tmp_path / "table.csv", TABLE)
    flags = f"--pipeline-model-parallel-size 2 --pipeline-schedule-csv {table} --train-samples 100"
    found = errors_of(
        minimal(f"{flags} --global-batch-size 4 --rampup-batch-size 2 2 24", without="--train-iters"), 2
    )
    assert any("but the global batch changes; use a --pipeline-schedule" in error for error in found), found
