"""The sizes and switches of a decoder, read from a `config.json`."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from anysearch_jax.policy import families, hf_config

_FULL, _SLIDING = "full_attention", "sliding_attention"
_ORIGINAL = "original_max_position_embeddings"
# Keys that must be positive integers where they are given.
_SIZES = """
  vocab_size hidden_size num_hidden_layers num_attention_heads
  num_key_value_heads head_dim intermediate_size moe_intermediate_size
  max_position_embeddings num_experts num_local_experts num_experts_per_tok
  query_pre_attn_scalar sliding_window sliding_window_pattern
  no_rope_layer_interval
""".split()
# Keys that transformers reads although its classes do not declare them.
_UNDECLARED = """
  head_dim layer_types num_experts num_local_experts
  original_max_position_embeddings partial_rotary_factor rope_local_base_freq
  rope_scaling rope_theta sliding_window sliding_window_pattern
""".split()
_MAGNITUDES = ("mscale", "mscale_all_dim")  # Of YaRN's attention factor.
# Options for which the decoder supports only these values.
_ONLY: Mapping[str, tuple] = {
  "hidden_act": ("silu", "swish"),
  # transformers treats null as false (`masking_utils.create_causal_mask`).
  "is_causal": (True,),
  "partial_rotary_factor": (1.0, 1, None),
  "per_layer_config": (None,),
  # Of earlier modelling code; the effect of other values is unknown.
  "rope_interleaved": (False, None),
  "use_mrope": (False, None),
}
# Keys in published files that families without them do not read, beyond those
# of `hf_config`.
_HARMLESS = """
  _sliding_window_pattern attention_bias attention_dropout experts_per_token
  initial_context_length is_decoder is_llama_config max_sequence_length
  max_window_layers mlp_bias moe_intermediate_size norm_topk_prob
  output_router_logits pretraining_tp
  router_aux_loss_coef use_sliding_window
""".split()


@dataclasses.dataclass(frozen=True)
class LinearRope:
  """RoPE whose frequencies are divided by `factor`."""

  kind = "linear"
  factor: float


@dataclasses.dataclass(frozen=True)
class Llama3Rope:
  """Llama-3.1's RoPE frequency scaling; the original length is in tokens."""

  kind = "llama3"
  factor: float
  low_freq_factor: float
  high_freq_factor: float
  original_max_position_embeddings: int


@dataclasses.dataclass(frozen=True)
class YarnRope:
  """YaRN's RoPE scaling, https://arxiv.org/abs/2309.00071.

  Frequencies of more than `beta_fast` turns in the original length (in tokens)
  are kept, and those below `beta_slow` turns are divided by `factor`, at least
  1. attention_factor: multiplies cos and sin. truncate: whether interpolation
  begins and ends at a whole dimension.
  """

  kind = "yarn"
  factor: float
  original_max_position_embeddings: int
  attention_factor: float
  beta_fast: float
  beta_slow: float
  truncate: bool


Rope = LinearRope | Llama3Rope | YarnRope
_ROPES: dict[str, type[Rope]] = {
  kind.kind: kind for kind in (LinearRope, Llama3Rope, YarnRope)
}
# Settings of RoPE that are no positive numbers.
_ROPE_KINDS = {
  _ORIGINAL: hf_config.SIZE,
  "truncate": hf_config.SWITCH,
}


@dataclasses.dataclass(frozen=True)
class Lora:
  """Low-rank adapters: W + alpha / rank * A B, with W frozen.

  rank: r >= 1. targets: which of `q k v o gate up down` have an adapter.
  See Hu et al. 2021, https://arxiv.org/abs/2106.09685.
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
  """Sizes and switches of a decoder (legend of `types`).

  vocab_size: rows of the embedding, including padding beyond the tokenizer's
  size. kv_heads divides heads. qkv_bias, o_bias, mlp_bias: whether these
  projections have biases. qk_norm: Qwen3's RMSNorm over each query and key
  head; query_scale: what it also multiplies queries by. unrotated: indices of
  the layers without rotary positions. experts: of width `mlp_dim` in each
  layer, of which a token uses `active`, weighted by a softmax that is
  `renormalized` over them or not; 0 is one feed-forward layer. joint_norm:
  whether `qk_norm` is over all heads together, as in Olmo 3. norms: whether
  they stand `before` attention and feed-forward, `after` them, or `around`
  them. norm_offset: what is added to their stored scales. gelu: whether the
  feed-forward layer has GELU by tanh in place of SiLU. scaled: whether
  embeddings are multiplied by the root of D. windowed: indices of the layers in
  which a token sees the last `window` tokens only, itself included; their
  rotary positions have `windowed_theta` and no scaling, unless it is 0. sinks:
  whether each head's softmax has one more, learned score. clamped: whether
  experts have gpt-oss's bounded SwiGLU, and they and routers biases. tied:
  whether the head is the embedding. max_context: in tokens, written to exported
  folders for servers, which refuse longer requests; the decoder itself has no
  limit. lora: the adapters, if any.
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
    """What attention has that XLA alone computes, "" if nothing."""
    found = {"attention sinks": self.sinks, "sliding windows": self.windowed}
    return next((name for name, has in found.items() if has), "")

  def without_lora(self) -> Architecture:
    """Returns the architecture of the base weights alone."""
    return dataclasses.replace(self, lora=None)

  def mean_attended(self, context: float) -> float:
    """Returns the tokens that a layer sees of a context, the layers' mean."""
    unseen = max(0, context - self.window) if self.windowed else 0
    return context - unseen * len(self.windowed) / self.layers


def from_hf(hf: Mapping[str, Any]) -> Architecture:
  """Reads a Hugging Face `config.json`, with old or new names of its keys.

  Args:
    hf: the values of the file.

  Raises:
    ValueError: the decoder does not support the architecture or an option, or a
      key has the wrong type; the message names it.
  """
  given = [key for key in _SIZES if hf.get(key) is not None]
  hf_config.check_types(hf, dict.fromkeys(given, hf_config.SIZE))
  name = _family(hf)
  family = families.FAMILIES[name]
  config = _config(hf, name)
  hf_config.check_types(
    {"rms_norm_eps": config.rms_norm_eps}, {"rms_norm_eps": hf_config.NUMBER}
  )
  layers, heads = config.num_hidden_layers, config.num_attention_heads
  kv_heads = config.num_key_value_heads or heads
  if heads % kv_heads:
    raise ValueError(
      f"config.json: {heads} attention heads do not divide over {kv_heads} "
      "key-value heads."
    )
  head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
  if head_dim < 2 or head_dim % 2:
    raise ValueError(
      f"config.json: heads of {head_dim} (head_dim, or hidden_size over "
      "num_attention_heads); expected an even size for the rotary positions."
    )
  fields = {**family.fields, **_windows(config, family)}
  rope = config.rope_parameters
  if family.layer_ropes:
    hf_config.check_keys(rope, understood=(_FULL, _SLIDING), only={})
    hf_config.check_types(
      rope, dict.fromkeys((_FULL, _SLIDING), hf_config.OBJECT)
    )
    if fields.get("windowed"):
      fields["windowed_theta"], scaling = _rope(rope[_SLIDING])
      if scaling is not None:
        raise ValueError(
          f"config.json: RoPE type {scaling.kind!r} of {_SLIDING} is not "
          "supported; expected 'default'."
        )
    rope = rope[_FULL]
  elif _ORIGINAL in hf:  # transformers prefers this key, unlike for theta.
    rope = {**rope, _ORIGINAL: hf[_ORIGINAL]}
  theta, scaling = _rope(rope)
  if family.experts:
    fields |= _experts(config)
  query_scalar = getattr(config, "query_pre_attn_scalar", head_dim)
  attention_bias = getattr(config, "attention_bias", False)
  return Architecture(
    family=name,
    vocab_size=config.vocab_size,
    d_model=config.hidden_size,
    layers=layers,
    heads=heads,
    kv_heads=kv_heads,
    head_dim=head_dim,
    norm_eps=config.rms_norm_eps,
    rope_theta=theta,
    rope_scaling=scaling,
    qkv_bias=family.qkv_bias or attention_bias,
    o_bias=attention_bias,
    mlp_bias=getattr(config, "mlp_bias", False),
    query_scale=(head_dim / query_scalar) ** 0.5,
    unrotated=_unrotated(config),
    tied=config.tie_word_embeddings,
    max_context=config.max_position_embeddings,
    **{"mlp_dim": config.intermediate_size, **fields},
  )


def _config(hf: Mapping[str, Any], name: str) -> Any:
  """Returns a file as transformers reads it, with its defaults.

  Args:
    hf: the values of the file.
    name: the family's.

  Raises:
    ValueError: a key may change what the model computes, or transformers
      refuses a value.
  """
  # Importing it takes a second, which most commands need not wait for.
  import transformers

  family = families.FAMILIES[name]
  if hf.get("quantization_config") and family.fields.get("clamped"):
    hf_config.check_types(hf, {"quantization_config": hf_config.OBJECT})
    if hf["quantization_config"].get("quant_method") == "mxfp4":
      hf = {**hf, "quantization_config": None}  # The tensors' types say it.
  experts = hf.get("num_experts"), hf.get("num_local_experts")
  if None not in experts and experts[0] != experts[1]:
    raise ValueError(
      f"config.json: num_experts {hf['num_experts']!r} contradicts "
      f"num_local_experts {hf['num_local_experts']!r}; expected one number."
    )
  kind = transformers.CONFIG_MAPPING[name]
  declared = {*_names(kind), *_UNDECLARED}
  hf_config.check_keys(
    hf,
    understood={*declared, "model_type"},
    harmless=_HARMLESS,
    only={**_ONLY, **family.only},
  )
  read = {key: value for key, value in hf.items() if key in declared}
  try:
    return kind(**copy.deepcopy(read))
  # It computes with values before it checks them, and so raises many types.
  except Exception as error:
    raise ValueError(
      f"config.json: transformers does not read it as {name}: "
      f"{' '.join(str(error).split()).removesuffix('.')}."
    ) from error


def _family(hf: Mapping[str, Any]) -> str:
  """Returns the family by class name or, if that is missing, `model_type`."""
  kind = hf.get("model_type")
  classes = {x.class_name: name for name, x in families.FAMILIES.items()}
  if hf.get("architectures") is not None:
    hf_config.check_types(hf, {"architectures": hf_config.NAMES})
  names = hf.get("architectures") or [
    name for name, family in classes.items() if family == kind
  ]
  if len(names) != 1 or names[0] not in classes:
    found = ", ".join(map(repr, names)) or f"'(none)' of model_type {kind!r}"
    raise ValueError(
      f"config.json: architecture {found} is not supported; expected one of "
      f"{', '.join(classes)}."
    )
  family = classes[names[0]]
  # transformers chooses the model by `model_type` alone, so both must agree.
  if kind not in (None, family):
    raise ValueError(
      f"config.json: model_type {kind!r} contradicts architecture "
      f"{names[0]!r}; expected {family!r}."
    )
  return family


def _windows(config: Any, family: families.Family) -> dict[str, Any]:
  """Returns the fields of `Architecture` about windows.

  Published Qwen files have a window size but do not use it
  (`use_sliding_window`), so the size alone is accepted.

  Args:
    config: as transformers reads the file.
    family: the model's.

  Raises:
    ValueError: a layer is of a type that the family does not have here.
  """
  layers, window = (
    config.num_hidden_layers,
    getattr(config, "sliding_window", None),
  )
  types = getattr(config, "layer_types", None)
  if types is None:  # The window is that of all layers.
    types = [_FULL if window is None else _SLIDING] * layers
  if len(types) != layers:
    raise ValueError(
      f"config.json: layer_types names {len(types)} layers, expected "
      f"{layers} (num_hidden_layers)."
    )
  if other := set(types) - {_FULL, _SLIDING}:
    raise ValueError(
      f"config.json: layer_types names {', '.join(map(repr, sorted(other)))}, "
      f"expected {_FULL!r} or {_SLIDING!r}."
    )
  windowed = tuple(i for i, kind in enumerate(types) if kind == _SLIDING)
  if not windowed:
    return {}
  if not family.windows:
    raise ValueError("config.json: sliding-window attention is not supported.")
  hf_config.check_types(
    {"sliding_window": window}, {"sliding_window": hf_config.SIZE}
  )
  return {"window": window, "windowed": windowed}


def _experts(config: Any) -> dict[str, Any]:
  """Returns the fields of `Architecture` about experts."""
  experts, active = config.num_experts, config.num_experts_per_tok
  if active > experts:
    raise ValueError(
      f"config.json: num_experts_per_tok is {active}, expected at most "
      f"num_experts, {experts}."
    )
  return {
    "experts": experts,
    "active": active,
    "mlp_dim": getattr(
      config, "moe_intermediate_size", config.intermediate_size
    ),
    "renormalized": getattr(config, "norm_topk_prob", True),
  }


def _unrotated(config: Any) -> tuple[int, ...]:
  """Returns the layers without rotary positions."""
  layers = config.num_hidden_layers
  rotated = getattr(config, "no_rope_layers", [1] * layers)
  if len(rotated) < layers:
    raise ValueError(
      f"config.json: no_rope_layers names {len(rotated)} layers, expected "
      f"{layers} (num_hidden_layers)."
    )
  return tuple(i for i in range(layers) if not rotated[i])


def _names(kind: type) -> list[str]:
  """Returns the names of a dataclass's fields."""
  return [field.name for field in dataclasses.fields(kind)]


def _rope(rope: Mapping[str, Any]) -> tuple[float, Rope | None]:
  """Returns theta and scaling of `rope_parameters`."""
  kind = rope.get("rope_type", "default")
  if kind not in ("default", *_ROPES):
    raise ValueError(
      f"config.json: RoPE type {kind!r} is not supported; expected 'default', "
      "'linear', 'llama3' or 'yarn'."
    )
  names = {kind: _names(scaling) for kind, scaling in _ROPES.items()}
  hf_config.check_keys(
    rope,
    understood={"rope_type", "type", "rope_theta", *_MAGNITUDES}.union(
      *names.values()
    ),
    only={"partial_rotary_factor": _ONLY["partial_rotary_factor"]},
  )
  hf_config.check_types(rope, {"rope_theta": hf_config.NUMBER})
  theta = float(rope["rope_theta"])
  if kind == "default":
    return theta, None
  if kind == "yarn":
    rope = _yarn(rope)
  kinds = {key: _ROPE_KINDS.get(key, hf_config.NUMBER) for key in names[kind]}
  hf_config.check_types(rope, kinds)
  scaling = _ROPES[kind](**{key: rope[key] for key in kinds})
  if isinstance(scaling, Llama3Rope):
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    if low >= high:
      raise ValueError(
        f"config.json: low_freq_factor is {low}, expected below "
        f"high_freq_factor, {high}: between the two, frequencies are blended."
      )
  if isinstance(scaling, YarnRope):
    fast, slow = scaling.beta_fast, scaling.beta_slow
    if scaling.factor < 1 or fast < slow or theta <= 1:
      raise ValueError(
        f"config.json: YaRN of factor {scaling.factor}, beta_fast {fast}, "
        f"beta_slow {slow} and rope_theta {theta}; expected a factor of at "
        "least 1, a beta_fast of at least beta_slow and a rope_theta above 1."
      )
  return theta, scaling


def _yarn(rope: Mapping[str, Any]) -> dict[str, Any]:
  """Returns YaRN's settings with the defaults of transformers."""
  given = {k: v for k, v in rope.items() if v is not None or k == "truncate"}
  numbers = ("factor", *(key for key in _MAGNITUDES if key in given))
  hf_config.check_types(given, dict.fromkeys(numbers, hf_config.NUMBER))

  def magnitude(scale: float = 1.0) -> float:
    return 0.1 * scale * math.log(given["factor"]) + 1

  attention = magnitude()
  if given.keys() >= {*_MAGNITUDES}:
    attention = magnitude(given["mscale"]) / magnitude(given["mscale_all_dim"])
  return {
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": True,
    "attention_factor": attention,
    **given,
  }


def to_hf(architecture: Architecture, **extra: Any) -> dict[str, Any]:
  """Returns a `config.json` for a policy without a source folder."""
  a = architecture
  rope: dict[str, Any] = {"rope_type": "default", "rope_theta": a.rope_theta}
  if a.rope_scaling is not None:
    rope |= dataclasses.asdict(a.rope_scaling)
    rope["rope_type"] = a.rope_scaling.kind
  if a.gelu:
    extra |= {"hidden_activation": "gelu_pytorch_tanh"}
    extra |= {"query_pre_attn_scalar": round(a.head_dim / a.query_scale**2)}
  family = families.FAMILIES[a.family]
  if family.layer_ropes:
    windowed = {"rope_type": "default", "rope_theta": a.windowed_theta}
    rope = {_FULL: rope} | ({_SLIDING: windowed} if a.windowed else {})
  if family.windows:
    types = [_SLIDING if i in a.windowed else _FULL for i in range(a.layers)]
    # transformers needs a number, also where no layer has a window.
    extra |= {"layer_types": types, "sliding_window": a.window or a.max_context}
  if a.family == "smollm3":
    rotated = [int(i not in a.unrotated) for i in range(a.layers)]
    extra |= {"no_rope_layers": rotated}
  if a.experts:
    extra |= {
      **{"num_experts": a.experts, "num_local_experts": a.experts},
      "num_experts_per_tok": a.active,
      "moe_intermediate_size": a.mlp_dim,
      "norm_topk_prob": a.renormalized,
    }
  return {
    "architectures": [family.class_name],
    "model_type": a.family,
    "vocab_size": a.vocab_size,
    "hidden_size": a.d_model,
    "num_hidden_layers": a.layers,
    "num_attention_heads": a.heads,
    "num_key_value_heads": a.kv_heads,
    "head_dim": a.head_dim,
    "intermediate_size": a.mlp_dim,
    **({} if a.gelu else {"hidden_act": "silu"}),
    "rms_norm_eps": a.norm_eps,
    "rope_parameters": rope,
    "rope_theta": a.rope_theta,
    "max_position_embeddings": a.max_context,
    "tie_word_embeddings": a.tied,
    "attention_bias": a.o_bias,
    "mlp_bias": a.mlp_bias,
    **extra,
  }
