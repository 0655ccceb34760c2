"""Defaults are Megatron-LM's, but for those listed here with their reason."""

from __future__ import annotations

import pytest

from megalite.config.settings import SETTINGS

# The starred flags of Megatron-LM's training script with their defaults there (core 0.20).
MEGATRON = {
    "ffn_hidden_size": None,
    "group_query_attention": False,
    "position_embedding_type": "learned_absolute",
    "rotary_base": 10000,
    "normalization": "LayerNorm",
    "norm_epsilon": 1e-5,
    "swiglu": False,
    "add_bias_linear": True,
    "untie_embeddings_and_output_weights": False,
    "make_vocab_size_divisible_by": 128,
    "init_method_std": 0.02,
    "attention_dropout": 0.1,
    "hidden_dropout": 0.1,
    "global_batch_size": None,
    "train_iters": None,
    "train_samples": None,
    "exit_duration_in_mins": None,
    "exit_signal_handler": False,
    "min_lr": 0,
    "lr_decay_style": "linear",
    "lr_decay_iters": None,
    "lr_warmup_iters": 0,
    "lr_warmup_fraction": None,
    "weight_decay": 0.01,
    "clip_grad": 1.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_eps": 1e-8,
    "params_dtype": "float32",  # neither --bf16 nor --fp16
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "sequence_parallel": False,
    "overlap_grad_reduce": False,
    "data_path": (),
    "split": "969, 30, 1",
    "data_cache_path": None,
    "mock_data": False,
    "num_workers": 2,
    "tokenizer_type": "GPT2BPETokenizer",
    "tokenizer_model": None,
    "vocab_file": None,
    "merge_file": None,
    "eval_iters": 100,
    "eval_interval": None,
    "log_interval": 100,
    "log_throughput": False,
    "tensorboard_dir": None,
    "save": None,
    "load": None,
    "save_interval": None,
    "seed": 1234,
    # not starred there, but settings here
    "optimizer": "adam",
    "initial_loss_scale": 2**32,
    "min_loss_scale": 1,
    "loss_scale_window": 1000,
    "hysteresis": 2,
    "rotary_percent": 1.0,
    "lr_warmup_init": 0,
    "lr_wsd_decay_style": "exponential",
    "distributed_backend": "nccl",
    "distributed_timeout_minutes": 10,
    "timing_log_level": 0,
}
DIFFERENT = {
    "attention_dropout": 0.0,  # pretraining on a large corpus goes without
    "hidden_dropout": 0.0,
    "num_workers": 0,  # memory-mapped tokens are read by a thread
    "distributed_backend": "auto",  # CPUs are a first-class target
}


@pytest.mark.parametrize("name", MEGATRON)
def test_default(name: str) -> None:
    assert SETTINGS[name].default == DIFFERENT.get(name, MEGATRON[name])
    assert not SETTINGS[name].required


@pytest.mark.parametrize("name", DIFFERENT)
def test_the_help_owns_up_to_a_difference(name: str) -> None:
    assert "Differs from Megatron" in SETTINGS[name].metadata["help"]


def test_required_settings() -> None:
    required = {setting.name for setting in SETTINGS.values() if setting.required}
    model = {"num_layers", "hidden_size", "num_attention_heads", "seq_length", "max_position_embeddings"}
    assert required == model | {"micro_batch_size", "lr"}
