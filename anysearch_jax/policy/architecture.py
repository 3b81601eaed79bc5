"""The architecture of a decoder: its sizes, its switches, RoPE and adapters.

`hf_architecture` reads it from a Hugging Face `config.json`.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class LinearRope:
  """RoPE whose frequencies are all divided by `factor`."""

  kind = "linear"
  factor: float


@dataclasses.dataclass(frozen=True)
class Llama3Rope:
  """Llama 3.1's RoPE scaling, which depends on the wavelength.

  Wavelengths above the original length / `low_freq_factor` are multiplied by
  `factor`, those below the original length / `high_freq_factor` are unchanged,
  and those in between are interpolated
  (`_compute_llama3_parameters` of transformers' `modeling_rope_utils`).

  Attributes:
    factor: how many times longer the new context is.
    low_freq_factor: turns within the original length below which a frequency is
      divided by `factor`.
    high_freq_factor: turns above which a frequency is unchanged.
    original_max_position_embeddings: the context length before scaling, in
      tokens.
  """

  kind = "llama3"
  factor: float
  low_freq_factor: float
  high_freq_factor: float
  original_max_position_embeddings: int


@dataclasses.dataclass(frozen=True)
class YarnRope:
  """YaRN's RoPE scaling, https://arxiv.org/abs/2309.00071.

  Attributes:
    factor: how many times longer the new context is, at least 1.
    original_max_position_embeddings: the context length before scaling, in
      tokens.
    attention_factor: multiplies cos and sin, so the scores by its square.
    beta_fast: frequencies with more turns than this within the original length
      are unchanged.
    beta_slow: frequencies with fewer turns are divided by `factor`; those in
      between are interpolated.
    truncate: whether the interpolation begins and ends at a whole dimension.
  """

  kind = "yarn"
  factor: float
  original_max_position_embeddings: int
  attention_factor: float
  beta_fast: float
  beta_slow: float
  truncate: bool


Rope = LinearRope | Llama3Rope | YarnRope


@dataclasses.dataclass(frozen=True)
class Lora:
  """Low-rank adapters: W + alpha / rank * A B, with W frozen.

  See Hu et al. 2021, https://arxiv.org/abs/2106.09685.

  Attributes:
    rank: columns of A and rows of B, at least 1.
    alpha: divided by the rank, it is the factor of A B.
    targets: the projections that have an adapter, of `q k v o gate up down`.
  """

  rank: int
  alpha: float
  targets: tuple[str, ...]

  @property
  def scale(self) -> float:
    """The factor of A B."""
    return self.alpha / self.rank


@dataclasses.dataclass(frozen=True)
class Architecture:
  """Sizes and switches of a decoder; capitals are the shape legend of `types`.

  The defaults are those of a Llama; `families` sets what a family changes.

  Attributes:
    family: `model_type` of config.json, a key of `families.FAMILIES`.
    vocab_size: V, rows of the embedding; it may exceed the tokenizer's size.
    d_model: D, the width of the residual stream.
    layers: L, the number of layers.
    heads: N, the query heads of a layer.
    kv_heads: K, the key-value heads of a layer; a divisor of `heads`.
    head_dim: H, the width of a head; even.
    mlp_dim: F, the inner width of the feed-forward layer, or of each expert.
    norm_eps: added to the mean square in every RMSNorm.
    rope_theta: the base of the rotary frequencies.
    rope_scaling: how the rotary frequencies are stretched to a longer context,
      if at all.
    qkv_bias: whether the projections to queries, keys and values have biases.
    o_bias: whether attention's output projection has a bias.
    mlp_bias: whether the feed-forward projections have biases.
    qk_norm: whether queries and keys go through an RMSNorm before RoPE.
    query_scale: multiplies normed queries, beside the usual 1 / sqrt(H).
    joint_norm: whether `qk_norm` is over all heads together (Olmo 3), not over
      each.
    norms: position of the norms: `before`, `after` or `around` each sublayer.
    norm_offset: added to the stored scales of norms; Gemma stores them minus 1.
    gelu: whether the feed-forward layer has GELU (by tanh) instead of SiLU.
    scaled: whether embeddings are multiplied by sqrt(D).
    unrotated: indices of the layers without rotary positions (NoPE).
    window: tokens that a query of a windowed layer sees, itself included.
    windowed: indices of the layers with sliding-window attention.
    windowed_theta: RoPE base of windowed layers, unscaled; 0: the RoPE of the
      others.
    experts: E, the experts of each layer; 0 means a dense feed-forward layer.
    active: experts that a token uses, the k of the router's top-k.
    renormalized: whether the router's top-k probabilities are divided by their
      sum.
    sinks: whether each head's softmax has one more, learned score without a
      value.
    clamped: whether experts are gpt-oss's: a clamped SwiGLU, and biases
      everywhere.
    tied: whether the LM head is the embedding.
    max_context: context in tokens, for exports: servers refuse longer requests
      by it. The decoder itself has no limit.
    lora: the adapters, if any.
  """

  family: str
  vocab_size: int
  d_model: int
  layers: int
  heads: int
  kv_heads: int
  head_dim: int
  mlp_dim: int
  norm_eps: float = 1e-6
  rope_theta: float = 10_000.0
  rope_scaling: Rope | None = None
  qkv_bias: bool = False
  o_bias: bool = False
  mlp_bias: bool = False
  qk_norm: bool = False
  query_scale: float = 1.0
  joint_norm: bool = False
  norms: str = "before"
  norm_offset: float = 0.0
  gelu: bool = False
  scaled: bool = False
  unrotated: tuple[int, ...] = ()
  window: int = 0
  windowed: tuple[int, ...] = ()
  windowed_theta: float = 0.0
  experts: int = 0
  active: int = 0
  renormalized: bool = False
  sinks: bool = False
  clamped: bool = False
  tied: bool = False
  max_context: int = 32768
  lora: Lora | None = None

  @property
  def xla_only_feature(self) -> str:
    """The attention feature that only XLA's implementation has, "" if none."""
    if self.sinks:
      return "attention sinks"
    return "sliding windows" if self.windowed else ""

  def without_lora(self) -> Architecture:
    """Returns the architecture of the base weights alone."""
    return dataclasses.replace(self, lora=None)

  def mean_attended(self, context: float) -> float:
    """Returns how many of `context` tokens a query sees, averaged by layer."""
    unseen = max(0, context - self.window) if self.windowed else 0
    return context - unseen * len(self.windowed) / self.layers
