"""The lines marked "device only": the device module, packed attention, a training step on a GPU."""

from __future__ import annotations

import pytest
import torch

from megalite.accelerator import (
    backend_for,
    local_device,
    peak_flops,
    peak_memory_bytes,
    pin,
    synchronize,
    to_device,
)
from megalite.config import (
    ActivationConfig,
    BatchConfig,
    Config,
    ModelConfig,
    OptimizerConfig,
    PrecisionConfig,
    RunConfig,
)
from megalite.data.batch import Batch
from megalite.model.core_attention import Documents, causal_attention
from megalite.parallel.topology import build_topology
from megalite.training.step import Trainer

SEQ, BATCH, VOCAB = 64, 2, 97


def test_copies_from_page_locked_memory_arrive() -> None:
    device = local_device()
    host = pin(torch.arange(1000))
    assert host.is_pinned()
    copy = to_device(host, device)
    synchronize(device)
    assert copy.is_cuda
    assert torch.equal(copy.cpu(), host)
    assert backend_for(device) == "nccl"
    assert peak_memory_bytes(device) >= copy.numel() * 8
    peak = peak_flops(device)
    assert peak is None or peak > 1e14  # None: a device that the table does not know


@pytest.mark.parametrize("groups", [2, 8])
def test_packed_attention_equals_attention_document_by_document(groups: int) -> None:
    """bf16 against fp32 on the CPU: both round their output, values near 1, to 8 bits."""
    starts = torch.tensor([0, 7, 64, 100, 128], dtype=torch.int32)
    q, k, v = (torch.randn(SEQ, BATCH, heads, 64, dtype=torch.bfloat16) for heads in (8, groups, groups))
    expected = causal_attention(q.float(), k.float(), v.float(), Documents(starts, 57))
    found = causal_attention(q.cuda(), k.cuda(), v.cuda(), Documents(starts.cuda(), 57))
    torch.testing.assert_close(found.float().cpu(), expected, rtol=0, atol=2 * 2**-7)


def _losses(device: torch.device, params_dtype: str, offloaded_layers: int = 0) -> list[float]:
    topology = build_topology(1, 1, device)
    config = Config(
        model=ModelConfig(
            num_layers=2,
            hidden_size=128,
            num_attention_heads=2,
            seq_length=SEQ,
            max_position_embeddings=SEQ,
            vocab_size=VOCAB,
            position_embedding_type="rope",
            normalization="RMSNorm",
            swiglu=True,
            add_bias_linear=False,
            hidden_dropout=0.1,
        ),
        batch=BatchConfig(micro_batch_size=BATCH, global_batch_size=2 * BATCH, train_iters=4),
        optimizer=OptimizerConfig(lr=1e-3),
        activations=ActivationConfig(cpu_offloading_num_layers=offloaded_layers),
        precision=PrecisionConfig(params_dtype=params_dtype),
        run=RunConfig(seed=1),
    )
    trainer = Trainer(config, topology)
    ids = torch.randint(VOCAB, (2, BATCH, SEQ + 1), generator=torch.Generator().manual_seed(1)).to(device)
    batches = [
        Batch(
            tokens=part[:, :-1],
            labels=part[:, 1:],
            loss_mask=torch.ones(BATCH, SEQ, device=device),
            position_ids=torch.arange(SEQ, device=device).expand(BATCH, SEQ),
            sample_index=torch.arange(BATCH) + BATCH * index,
        )
        for index, part in enumerate(ids)
    ]
    return [float(trainer.train_step(batches, 1e-3).loss) for _ in range(4)]


@pytest.mark.parametrize(("params_dtype", "tolerance"), [("float64", 1e-10), ("bfloat16", 0.02)])
def test_training_gives_the_losses_of_the_cpu(params_dtype: str, tolerance: float) -> None:
    """fp64 to the rounding of sums in another order; bf16 to its 8 bits in a loss of about 4.6."""
    expected = _losses(torch.device("cpu"), params_dtype)
    assert _losses(local_device(), params_dtype) == pytest.approx(expected, abs=tolerance)


def test_activations_that_waited_in_host_memory_give_the_same_losses() -> None:
    device = local_device()
    expected = _losses(device, "float64")
    assert _losses(device, "float64", offloaded_layers=2) == pytest.approx(expected, abs=1e-10)
