"""The reference equals Hugging Face's models in fp64, logits and every gradient: the truth is not our own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    Ernie4_5Config,
    Ernie4_5ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from tests.reference import gpt, hugging_face, train
from tests.reference.compare import differences

TOLERANCE = 1e-10
VOCAB, BATCH, SEQ = 61, 3, 17


@pytest.fixture(autouse=True)
def double_precision() -> Iterator[None]:
    """All that Transformers builds or computes is fp64, the constructor's rotary frequencies included."""
    previous = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    with hugging_face.NoSinglePrecision():
        yield
    torch.set_default_dtype(previous)


def batch(seed: int) -> train.GlobalBatch:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCAB, (BATCH, SEQ + 1), generator=generator)
    mask = torch.rand(BATCH, SEQ, generator=generator) < 0.7
    mask[1] = False
    mask[1, 4] = True
    return train.GlobalBatch(tokens[:, :-1], tokens[:, 1:], mask.double())


def compare(
    model: PreTrainedModel,
    architecture: gpt.Architecture,
    to_global: Callable[[Mapping[str, Tensor], Any], dict[str, Tensor]],
) -> None:
    hugging_face.randomize(model, seed=7)
    model.eval()
    model.set_attn_implementation("eager")
    weights = to_global(hugging_face.parameters(model), model.config)
    assert sum(value.numel() for value in weights.values()) == sum(p.numel() for p in model.parameters())
    assert all(value.dtype == torch.float64 for value in weights.values())

    data = batch(seed=11)
    theirs = model(input_ids=data.tokens).logits
    torch.testing.assert_close(gpt.logits(weights, architecture, data.tokens), theirs, rtol=0, atol=TOLERANCE)

    targets = data.labels.masked_fill(data.loss_mask == 0, -100)
    loss = torch.nn.functional.cross_entropy(theirs.flatten(0, 1), targets.flatten(), ignore_index=-100)
    loss.backward()
    expected = to_global(hugging_face.gradients(model), model.config)
    ours, gradients = train.loss_and_gradients(weights, architecture, data)
    torch.testing.assert_close(ours, loss.detach(), rtol=0, atol=TOLERANCE)
    for name, gradient in expected.items():
        assert gradient.abs().max() > 1e-6, f"{name} has no gradient to compare"
    assert not differences(gradients, expected, TOLERANCE)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_gpt2(tied: bool) -> None:
    config = GPT2Config(
        vocab_size=VOCAB, n_positions=SEQ + 2, n_embd=24, n_layer=3, n_head=4, tie_word_embeddings=tied
    )
    compare(GPT2LMHeadModel(config), hugging_face.gpt2_architecture(config), hugging_face.gpt2_to_global)


@pytest.mark.parametrize("groups", [4, 2, 1], ids=["mha", "gqa", "mqa"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_llama(groups: int, tied: bool) -> None:
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=groups,
        max_position_embeddings=SEQ + 2,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
        tie_word_embeddings=tied,
    )
    compare(LlamaForCausalLM(config), hugging_face.llama_architecture(config), hugging_face.llama_to_global)


def test_llama_with_biases_and_wider_heads() -> None:
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=10,
        attention_bias=True,
        mlp_bias=True,
    )
    compare(LlamaForCausalLM(config), hugging_face.llama_architecture(config), hugging_face.llama_to_global)


def test_interleaved_rotary_embedding_as_in_ernie() -> None:
    config = Ernie4_5Config(
        vocab_size=VOCAB,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=6,
    )
    architecture = hugging_face.llama_architecture(config, interleaved=True)
    compare(Ernie4_5ForCausalLM(config), architecture, hugging_face.llama_to_global)


def test_partial_rotary_embedding_as_in_gpt_neox() -> None:
    config = GPTNeoXConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=SEQ + 2,
        hidden_act="gelu_new",
        use_parallel_residual=False,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    )
    architecture = hugging_face.gpt_neox_architecture(config)
    assert architecture.rotary_percent == 0.5
    compare(GPTNeoXForCausalLM(config), architecture, hugging_face.gpt_neox_to_global)


def test_training_steps_as_with_torch_optimizer() -> None:
    """Three steps equal PyTorch's own AdamW (two groups: decayed and exempt) and gradient clipping."""
    config = GPT2Config(vocab_size=VOCAB, n_positions=SEQ, n_embd=16, n_layer=2, n_head=2)
    model = GPT2LMHeadModel(config)
    hugging_face.randomize(model, seed=3)
    model.eval()
    model.set_attn_implementation("eager")
    batches, rates = [batch(seed) for seed in (21, 22, 23)], [1e-2, 2e-2, 5e-3]
    recipe = train.Recipe(adam_beta2=0.95, adam_eps=1e-6, weight_decay=0.1, clip_grad=0.5)
    weights = hugging_face.gpt2_to_global(hugging_face.parameters(model), config)
    steps = train.train(weights, hugging_face.gpt2_architecture(config), batches, rates, recipe)

    trained: list[torch.nn.Parameter] = list(model.parameters())
    decayed = [parameter for parameter in trained if parameter.dim() > 1]
    exempt = [parameter for parameter in trained if parameter.dim() == 1]
    groups: list[dict[str, Any]] = [{"params": decayed}, {"params": exempt, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(
        groups,
        betas=(0.9, 0.95),
        eps=1e-6,
        weight_decay=0.1,
    )
    for step, data, rate in zip(steps, batches, rates, strict=True):
        optimizer.zero_grad()
        targets = data.labels.masked_fill(data.loss_mask == 0, -100)
        scores = model(input_ids=data.tokens).logits
        loss = torch.nn.functional.cross_entropy(scores.flatten(0, 1), targets.flatten(), ignore_index=-100)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(trained, 0.5)
        assert norm > 0.5, "clipping must be at work here"
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        assert step.loss == pytest.approx(loss.item(), abs=TOLERANCE)
        assert step.grad_norm == pytest.approx(norm.item(), abs=TOLERANCE)
        expected = hugging_face.gpt2_to_global(hugging_face.parameters(model), config)
        assert not differences(step.weights, expected, TOLERANCE)
