"""Bugs that other kernel libraries had, each with the tests that would show it here."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megalite import kernels
from megalite.kernels import (
    add_rms_norm,
    linear_cross_entropy,
    rms_norm,
    rope,
    rotary_table,
    swiglu,
    swiglu_pair,
    vocab_parallel_cross_entropy,
)

TESTS = Path(__file__).parents[1]
CROSS_ENTROPY, LINEAR = "triton_cases/test_cross_entropy.py", "test_linear_cross_entropy.py"
NORM, ROPE, SWIGLU = (f"triton_cases/test_{name}.py" for name in ("rms_norm", "rope", "swiglu"))
FLAT, GPU, HERE = "triton_cases/test_flat.py", "../gpu/test_on_gpu.py", "test_bug_table.py"

# What happened, where, and the tests: file below tests/kernels, then names.
BUGS: dict[str, list[tuple[str, list[str]]]] = {
    "no valid label: division by zero (Liger#177)": [(CROSS_ENTROPY, ["test_all_targets_ignored"])],
    "no valid label: NaN weight gradient (torch 2.13, chunked)": [(LINEAR, ["test_all_targets_ignored"])],
    "one rank without a valid label: NaN mean (pytorch#70348, Megatron#1764, torchtune#2341)": [
        ("test_vocab_parallel.py", ["test_a_rank_without_valid_targets_leaves_the_mean_finite"])
    ],
    "gradient written over the logits without a sign of it (Liger#272, #343)": [
        (CROSS_ENTROPY, ["test_in_place_gradient_and_what_it_forbids"])
    ],
    "norm's gradient written over the incoming one (Liger#370)": [
        (NORM, ["test_the_residuals_gradient_survives_its_other_uses"])
    ],
    "rotation in place, turned twice by recompute (unsloth#5001)": [
        (ROPE, ["test_recompute_under_checkpointing"])
    ],
    "second backward from overwritten inputs (Liger SwiGLU)": [
        (SWIGLU, ["test_a_second_backward_gives_the_same"]),
        (LINEAR, ["test_a_second_backward"]),
    ],
    "every token scaled by the first one's gradient (Liger#968, #678)": [
        (CROSS_ENTROPY, ["test_vocabularies", "test_strided_gradients"])
    ],
    "weight gradient summed in bf16 over chunks (Liger#512, #830, apple#14)": [
        (LINEAR, ["test_many_chunks_in_bf16_accumulate_in_fp32"])
    ],
    "loss 0 without gradients (Liger#507)": [
        (CROSS_ENTROPY, ["test_without_gradient"]),
        (LINEAR, ["test_a_main_gradient_is_left_alone_in_evaluation"]),
    ],
    "rope lost with one head (Liger#342)": [(ROPE, ["test_single_heads_tokens_and_samples"])],
    "expanded or strided gradient read as if contiguous (quack#88, unsloth#10617)": [
        (file, ["test_strided_gradients"]) for file in (NORM, ROPE, SWIGLU, CROSS_ENTROPY)
    ],
    "torch.compile traces into the kernel (quack#18, Liger#174)": [
        ("test_registration.py", ["test_compiles_into_one_graph", "test_operator"]),
        (LINEAR, ["test_compiles_into_one_graph"]),
    ],
    "scalars in fp64 (Liger#1350)": [
        ("test_ahead_of_time.py", ["test_double_precision_scalars_stay_out_of_the_arithmetic", "test_kernel"])
    ],
    "vocabulary beyond 65536 refused (unsloth#19), no multiple of the tile wrong (verl#2899)": [
        (CROSS_ENTROPY, ["test_vocabularies"])
    ],
    "another rank's target meets a padded column (apple#59); hidden gradient not summed (apple#42)": [
        (CROSS_ENTROPY, ["test_a_target_of_another_rank_never_meets_a_padded_column"]),
        (LINEAR, ["test_any_cut_of_the_vocabulary"]),
    ],
    "label smoothing over the own shard (Megatron#737, #7452), uneven shards (Megatron#1754)": [
        ("test_vocab_parallel.py", ["test_any_cut_of_the_vocabulary"]),
        (CROSS_ENTROPY, ["test_any_cut_of_the_vocabulary"]),
    ],
    "log(exp(x - max)) of a logit far below the largest (Liger, Megatron-LM)": [
        (CROSS_ENTROPY, ["test_finite_for_a_logit_gap_of_200"])
    ],
    "2^31 parameters (apex#1654, DeepSpeed#7640)": [
        (GPU, ["test_more_than_two_to_the_31_parameters"]),
        ("test_ahead_of_time.py", ["test_kernel"]),
    ],
    "2^31 elements or a far row (pytorch#85786, onnxruntime#16363, llm.c#212; Liger's block norm)": [
        *((file, ["test_rows_beyond_two_to_the_31"]) for file in (NORM, SWIGLU, CROSS_ENTROPY)),
        (ROPE, ["test_tokens_beyond_two_to_the_31"]),
        (GPU, ["test_more_than_two_to_the_31_logits"]),
    ],
    "bf16 master silently unused (apex#1728)": [
        (FLAT, ["test_updates_below_the_weights_precision_add_up_in_the_master"])
    ],
    "remainder of the master off by a rounding (apex#1842)": [
        ("test_adamw.py", ["test_a_remainder_gives_back_every_bit_of_the_master"]),
        (FLAT, ["test_remainder_and_master_forms_are_the_same_bits"]),
    ],
    "a group that ends in an empty tensor is skipped (TE#3207)": [(FLAT, ["test_empty_buffers"])],
    "tensor of another device than the current (triton#2441, torchtitan#1225)": [
        (GPU, ["test_a_tensor_of_another_device_than_the_current"])
    ],
    "autotuning runs a kernel in place several times (triton#781, lion-pytorch#36)": [
        (HERE, ["test_no_kernel_is_autotuned"]),
        (NORM, ["test_weight_gradient_is_reproducible"]),
    ],
    "bf16 in the interpreter (triton#11584)": [
        ("triton_cases/test_bfloat16.py", ["test_rounds_to_nearest_ties_to_even", "test_multiplies_matrices"])
    ],
    "host synchronisation (Liger#1292, tritonbench#477)": [
        (GPU, ["test_no_host_synchronisation", "test_capture_in_a_graph"])
    ],
    "p - 1 rounded to 0 (TE#3193)": [
        (CROSS_ENTROPY, ["test_gradient_keeps_its_digits_where_p_nears_1"])
    ],
    "1 + w of Gemma (Liger#74)": [(NORM, ["test_weight_offset"])],
    "operation without a gradient (LongLive#61)": [(HERE, ["test_every_operation_has_a_gradient"])],
    "masked load beyond its tensor (triton#10336)": [(HERE, ["test_shapes_that_do_not_fit_are_refused"])],
    "mean over each micro-batch (fla#539, lightning#21386)": [
        (CROSS_ENTROPY, ["test_microbatches_of_unequal_counts_add_up"])
    ],
    "mixed dtypes, int32 targets": [
        (NORM, ["test_mixed_dtypes", "test_wide_residual_under_a_narrow_branch"]),
        (CROSS_ENTROPY, ["test_int32_targets"]),
    ],
}  # fmt: skip
# Without a counterpart here: a bias of the fused head (apple#52), as the head has none.


@pytest.mark.parametrize("bug", BUGS)
def test_each_bug_has_its_tests(bug: str) -> None:
    for file, names in BUGS[bug]:
        text = (TESTS / "kernels" / file).read_text()
        missing = [name for name in names if not re.search(rf"^def {name}\(", text, re.MULTILINE)]
        assert not missing, f"{file} has no {', '.join(missing)}"


def test_no_kernel_is_autotuned() -> None:
    """What runs depends on the shape alone, and nothing runs twice: some kernels write over their inputs."""
    for file in Path(str(kernels.__file__)).parent.glob("*.py"):
        assert "autotune" not in file.read_text(), file.name


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()


COS, SIN = rotary_table(torch.arange(4), 8)
IDS = torch.zeros(4, 2, dtype=torch.int64)
OPERATIONS: dict[str, tuple[Callable[..., Tensor | tuple[Tensor, ...]], list[tuple[int, ...]]]] = {
    "rms_norm": (rms_norm, [(4, 2, 16), (16,)]),
    "add_rms_norm": (add_rms_norm, [(4, 2, 16), (4, 2, 16), (16,)]),
    "swiglu": (swiglu, [(4, 2, 16)]),
    "swiglu_pair": (swiglu_pair, [(4, 16), (4, 16)]),
    "rope": (
        lambda q, k, backend: rope(q, k, COS, SIN, backend=backend),
        [(4, 2, 3, 8), (4, 2, 1, 8)],
    ),
    "vocab_parallel_cross_entropy": (
        lambda x, backend: vocab_parallel_cross_entropy(x, IDS, 0, 16, backend=backend),
        [(4, 2, 16)],
    ),
    "linear_cross_entropy": (
        lambda x, w, backend: linear_cross_entropy(x, w, IDS, 0, 16, backend=backend),
        [(4, 2, 8), (16, 8)],
    ),
}


def test_the_operations_are_all_there() -> None:
    others = {name for name in kernels.__all__ if name.endswith(("_reference", "Scaling", "_table"))}
    assert set(OPERATIONS) == set(kernels.__all__) - others


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OPERATIONS)
def test_every_operation_has_a_gradient(name: str, dtype: torch.dtype, backend: str) -> None:
    """For Triton `exactness.check` in triton_cases compares each gradient."""
    operation, shapes = OPERATIONS[name]
    inputs = [leaf(*shape, dtype=dtype) for shape in shapes]
    outputs = operation(*inputs, backend=backend)
    total = sum(
        out.float().square().sum() for out in ((outputs,) if isinstance(outputs, Tensor) else outputs)
    )
    assert isinstance(total, Tensor)
    assert total.requires_grad
    total.backward()
    for tensor in inputs:
        assert tensor.grad is not None
        assert tensor.grad.dtype == dtype
        assert tensor.grad.abs().sum() > 0


@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        ("rms_norm", [(4, 2, 16), (17,)]),
        ("rms_norm", [(4, 2, 16), (1, 16)]),
        ("add_rms_norm", [(4, 2, 16), (4, 1, 16), (16,)]),
        ("add_rms_norm", [(4, 2, 16), (4, 2, 16), (8,)]),
        ("swiglu", [(4, 3, 16)]),
        ("swiglu_pair", [(4, 16), (4, 8)]),
        ("rope", [(4, 2, 3, 6), (4, 2, 1, 8)]),
        ("rope", [(3, 2, 3, 8), (4, 2, 1, 8)]),
        ("vocab_parallel_cross_entropy", [(4, 3, 16)]),
        ("linear_cross_entropy", [(4, 2, 8), (16, 9)]),
        ("linear_cross_entropy", [(4, 3, 8), (16, 8)]),
    ],
)
def test_shapes_that_do_not_fit_are_refused(name: str, shapes: Sequence[tuple[int, ...]]) -> None:
    """A kernel's mask knows one length and would read another tensor beyond its end."""
    with pytest.raises(ValueError, match=r"\d"):
        OPERATIONS[name][0](*(leaf(*shape) for shape in shapes), backend="torch")
