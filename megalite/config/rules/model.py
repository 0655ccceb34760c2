"""Rules inside the model."""

from __future__ import annotations

from collections.abc import Iterator

from megalite.config.rules.rule import Candidate, Finding, divisors, listed, multiples_around, reads


@reads("hidden_size", "num_attention_heads", "kv_channels")
def hidden_is_divisible(c: Candidate) -> Iterator[Finding]:
    hidden, heads = c.config.model.hidden_size, c.config.model.num_attention_heads
    if hidden % heads and "kv_channels" not in c.given:
        rule = f"hidden size {hidden} not divisible by {heads} heads"
        advice = f"nearest: {multiples_around(hidden, heads)}; or give the head size by --kv-channels"
        yield "hidden_size", hidden, rule, advice


@reads("num_query_groups", "group_query_attention", "num_attention_heads")
def groups_divide_heads(c: Candidate) -> Iterator[Finding]:
    model = c.config.model
    groups, heads = model.num_query_groups, model.num_attention_heads
    if heads % groups:
        rule = f"{heads} heads not divisible by {groups} query groups"
        yield "num_query_groups", groups, rule, f"valid groups: {listed(divisors(heads))}"
    elif not model.group_query_attention and groups != heads:
        rule = f"would be ignored by Megatron without --group-query-attention: {heads} heads, one group each"
        yield "num_query_groups", groups, rule, "add --group-query-attention, or leave it out"


@reads("kv_channels", "hidden_size", "num_attention_heads", "position_embedding_type", "rotary_percent")
def rotary_width_is_even(c: Candidate) -> Iterator[Finding]:
    model = c.config.model
    if not model.has_rotary_positions or model.hidden_size < model.num_attention_heads:
        return
    rotated = int(model.kv_channels * model.rotary_percent)
    if rotated % 2 or rotated == 0:
        rule = f"rope rotates pairs, and {rotated} of the {model.kv_channels} channels of a head are rotated"
        yield "kv_channels", model.kv_channels, rule, "make head size x --rotary-percent even and at least 2"


YARN = ("yarn_rotary_scaling_factor", "yarn_original_max_position_embeddings")


@reads("position_embedding_type", *YARN, "use_rope_scaling", "yarn_beta_fast", "yarn_beta_slow")
def scaled_positions_are_complete(c: Candidate) -> Iterator[Finding]:
    model = c.config.model
    if model.position_embedding_type != "yarn":
        return
    for name in YARN:
        if getattr(model, name) is None:
            example = "e.g. 4" if name == YARN[0] else "the context length first trained with"
            yield name, None, "is required with --position-embedding-type yarn", f"give it, {example}"
    if model.use_rope_scaling:
        rule = "is Llama 3's scaling, and --position-embedding-type yarn another"
        yield "use_rope_scaling", None, rule, "leave it out, or use --position-embedding-type rope"
    if model.yarn_beta_fast <= model.yarn_beta_slow:
        rule = f"must be more than --yarn-beta-slow {model.yarn_beta_slow:g}"
        yield "yarn_beta_fast", model.yarn_beta_fast, rule, "the paper has 32 and 1"


@reads("hidden_size", "num_attention_heads", "kv_channels")
def heads_have_channels(c: Candidate) -> Iterator[Finding]:
    hidden, heads = c.config.model.hidden_size, c.config.model.num_attention_heads
    if c.config.model.kv_channels < 1:
        yield "num_attention_heads", heads, f"more heads than hidden channels ({hidden})", f"at most {hidden}"


@reads("swiglu", "hidden_size", "ffn_hidden_size")
def ffn_is_not_empty(c: Candidate) -> Iterator[Finding]:
    model = c.config.model
    if model.ffn_hidden_size < 1:
        rule = f"the default MLP width of --swiglu rounds to 0 for hidden size {model.hidden_size}"
        yield "ffn_hidden_size", None, rule, f"give it, e.g. {4 * model.hidden_size}"


@reads("seq_length", "max_position_embeddings")
def positions_cover_the_sequence(c: Candidate) -> Iterator[Finding]:
    seq, positions = c.config.model.seq_length, c.config.model.max_position_embeddings
    if seq > positions:
        rule = f"{positions} positions are fewer than the {seq} tokens of --seq-length"
        yield "max_position_embeddings", positions, rule, f"at least {seq}"


@reads("vocab_size", "null_tokenizer_eod_id", "tokenizer_type")
def eod_is_in_the_vocabulary(c: Candidate) -> Iterator[Finding]:
    eod, size = c.config.data.null_tokenizer_eod_id, c.config.model.vocab_size
    if eod is not None and c.config.data.tokenizer_type == "NullTokenizer" and eod >= size:
        yield "null_tokenizer_eod_id", eod, f"not in the vocabulary of {size} tokens", f"0 to {size - 1}"


@reads("cross_entropy_loss_fusion", "cross_entropy_fusion_impl")
def fusion_is_switched_on(c: Candidate) -> Iterator[Finding]:
    loss = c.config.loss
    if loss.cross_entropy_fusion_impl != "native" and not loss.cross_entropy_loss_fusion:
        rule = "would be ignored by Megatron without --cross-entropy-loss-fusion"
        yield "cross_entropy_fusion_impl", loss.cross_entropy_fusion_impl, rule, "add it, or leave this out"


@reads("attention_dropout", "reset_attention_mask")
def nothing_is_asked_that_is_missing(c: Candidate) -> Iterator[Finding]:
    """Settings whose other values belong to a later version."""
    rate = c.config.model.attention_dropout
    if rate and c.config.data.reset_attention_mask:
        yield "attention_dropout", rate, "is not available with --reset-attention-mask", "0"


RULES = (
    hidden_is_divisible,
    heads_have_channels,
    groups_divide_heads,
    rotary_width_is_even,
    scaled_positions_are_complete,
    ffn_is_not_empty,
    positions_cover_the_sequence,
    eod_is_in_the_vocabulary,
    fusion_is_switched_on,
    nothing_is_asked_that_is_missing,
)
