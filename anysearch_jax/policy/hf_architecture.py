"""Reads and writes the architecture of a Hugging Face `config.json`."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from anysearch_jax.policy import architecture as architecture_lib
from anysearch_jax.policy import families, hf_config

# Types of layers, in `layer_types`.
_FULL = "full_attention"
_SLIDING = "sliding_attention"
# RoPE's key for the context length before scaling.
ORIGINAL_CONTEXT = "original_max_position_embeddings"
# Keys that must be positive integers where they are given.
_SIZES = (
  "vocab_size",
  "hidden_size",
  "num_hidden_layers",
  "num_attention_heads",
  "num_key_value_heads",
  "head_dim",
  "intermediate_size",
  "moe_intermediate_size",
  "max_position_embeddings",
  "num_experts",
  "num_local_experts",
  "num_experts_per_tok",
  "query_pre_attn_scalar",
  "sliding_window",
  "sliding_window_pattern",
  "no_rope_layer_interval",
)
# Keys that transformers reads although its classes do not declare them.
_UNDECLARED = (
  "head_dim",
  "layer_types",
  "num_experts",
  "num_local_experts",
  "original_max_position_embeddings",
  "partial_rotary_factor",
  "rope_local_base_freq",
  "rope_scaling",
  "rope_theta",
  "sliding_window",
  "sliding_window_pattern",
)
# Scales of YaRN's attention factor, of DeepSeek-V2: for queries and keys that
# are rotated, and for all of their dimensions.
_YARN_SCALES = ("mscale", "mscale_all_dim")
# Options of which the decoder supports only these values.
_ALLOWED_VALUES: Mapping[str, tuple] = {
  "hidden_act": ("silu", "swish"),
  # transformers treats null as false (`masking_utils.create_causal_mask`).
  "is_causal": (True,),
  "partial_rotary_factor": (1.0, 1, None),
  "per_layer_config": (None,),
  # Keys of earlier modelling code; the effect of other values is unknown.
  "rope_interleaved": (False, None),
  "use_mrope": (False, None),
}
# Keys that published files have although their family's code ignores them,
# beyond those of `hf_config`.
_HARMLESS = (
  "_sliding_window_pattern",
  "attention_bias",
  "attention_dropout",
  "experts_per_token",
  "initial_context_length",
  "is_decoder",
  "is_llama_config",
  "max_sequence_length",
  "max_window_layers",
  "mlp_bias",
  "moe_intermediate_size",
  "norm_topk_prob",
  "output_router_logits",
  "pretraining_tp",
  "router_aux_loss_coef",
  "use_sliding_window",
)
_SCALINGS: dict[str, type[architecture_lib.Rope]] = {
  "linear": architecture_lib.LinearRope,
  "llama3": architecture_lib.Llama3Rope,
  "yarn": architecture_lib.YarnRope,
}
# Settings of RoPE whose values are not positive numbers.
_SETTING_KINDS = {
  ORIGINAL_CONTEXT: hf_config.SIZE,
  "truncate": hf_config.SWITCH,
}


def from_hf(hf: Mapping[str, Any]) -> architecture_lib.Architecture:
  """Reads the values of a `config.json`, with old or new names of its keys.

  Raises:
    ValueError: the decoder does not support the architecture or an option, or a
      key has the wrong type; the message names it.
  """
  sizes = [key for key in _SIZES if hf.get(key) is not None]
  hf_config.check_types(hf, dict.fromkeys(sizes, hf_config.SIZE))
  family_name = _family_name(hf)
  family = families.FAMILIES[family_name]
  config = _transformers_config(hf, family_name)
  hf_config.check_types(
    {"rms_norm_eps": config.rms_norm_eps}, {"rms_norm_eps": hf_config.NUMBER}
  )
  heads = config.num_attention_heads
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
  fields = {
    "mlp_dim": config.intermediate_size,
    **family.architecture_fields,
    **_window_fields(config, family),
  }
  rope = config.rope_parameters
  if family.layer_ropes:
    hf_config.check_keys(rope, understood=(_FULL, _SLIDING), only={})
    hf_config.check_types(
      rope, dict.fromkeys((_FULL, _SLIDING), hf_config.OBJECT)
    )
    if fields.get("windowed"):
      fields["windowed_theta"] = _unscaled_theta(rope[_SLIDING])
    rope = rope[_FULL]
  elif ORIGINAL_CONTEXT in hf:
    # transformers prefers this key to the one inside, unlike for theta.
    rope = {**rope, ORIGINAL_CONTEXT: hf[ORIGINAL_CONTEXT]}
  theta, scaling = _rope(rope)
  if family.experts:
    fields |= _expert_fields(config)
  query_scalar = getattr(config, "query_pre_attn_scalar", head_dim)
  attention_bias = getattr(config, "attention_bias", False)
  return architecture_lib.Architecture(
    family=family_name,
    vocab_size=config.vocab_size,
    d_model=config.hidden_size,
    layers=config.num_hidden_layers,
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
    **fields,
  )


def _transformers_config(hf: Mapping[str, Any], family_name: str) -> Any:
  """Returns the configuration object of transformers, defaults included.

  Raises:
    ValueError: a key may change what the model computes, or transformers
      refuses a value.
  """
  # Importing it takes a second, which most commands need not wait for.
  import transformers

  family = families.FAMILIES[family_name]
  is_gpt_oss = family.architecture_fields.get("clamped", False)
  if is_gpt_oss and hf.get("quantization_config"):
    hf_config.check_types(hf, {"quantization_config": hf_config.OBJECT})
    if hf["quantization_config"].get("quant_method") == "mxfp4":
      # `tensor_files` recognises MXFP4 by the tensors themselves.
      hf = {**hf, "quantization_config": None}
  # The same number by the names of two versions of transformers.
  counts = {hf.get("num_experts"), hf.get("num_local_experts")} - {None}
  if len(counts) > 1:
    raise ValueError(
      f"config.json: num_experts {hf['num_experts']!r} contradicts "
      f"num_local_experts {hf['num_local_experts']!r}; expected one number."
    )
  config_class = transformers.CONFIG_MAPPING[family_name]
  declared = {*_field_names(config_class), *_UNDECLARED}
  hf_config.check_keys(
    hf,
    understood={*declared, "model_type"},
    harmless=_HARMLESS,
    only={**_ALLOWED_VALUES, **family.allowed_values},
  )
  arguments = {key: value for key, value in hf.items() if key in declared}
  try:
    # A copy, because the class changes nested values in place.
    return config_class(**copy.deepcopy(arguments))
  # It computes with values before it checks them, and so raises many types.
  except Exception as error:
    raise ValueError(
      f"config.json: transformers does not read it as {family_name}: "
      f"{' '.join(str(error).split()).removesuffix('.')}."
    ) from error


def _family_name(hf: Mapping[str, Any]) -> str:
  """Returns the family of the class name or, without one, of `model_type`."""
  model_type = hf.get("model_type")
  name_by_class = {x.class_name: name for name, x in families.FAMILIES.items()}
  if hf.get("architectures") is not None:
    hf_config.check_types(hf, {"architectures": hf_config.NAMES})
  classes = hf.get("architectures") or [
    class_name
    for class_name, name in name_by_class.items()
    if name == model_type
  ]
  if len(classes) != 1 or classes[0] not in name_by_class:
    names = ", ".join(map(repr, classes))
    names = names or f"'(none)' of model_type {model_type!r}"
    raise ValueError(
      f"config.json: architecture {names} is not supported; expected one of "
      f"{', '.join(name_by_class)}."
    )
  family_name = name_by_class[classes[0]]
  # transformers chooses the model by `model_type` alone, so both must agree.
  if model_type not in (None, family_name):
    raise ValueError(
      f"config.json: model_type {model_type!r} contradicts architecture "
      f"{classes[0]!r}; expected {family_name!r}."
    )
  return family_name


def _window_fields(config: Any, family: families.Family) -> dict[str, Any]:
  """Returns `window` and `windowed` of `Architecture`, {} without windows.

  Published Qwen files have a window size but do not use it
  (`use_sliding_window`), so the size alone is accepted.

  Args:
    config: the configuration object of transformers.
    family: the model's family.

  Raises:
    ValueError: a layer has a type that this family does not have here.
  """
  layers = config.num_hidden_layers
  window = getattr(config, "sliding_window", None)
  types = getattr(config, "layer_types", None)
  if types is None:  # A window without types applies to all layers.
    types = [_FULL if window is None else _SLIDING] * layers
  if len(types) != layers:
    raise ValueError(
      f"config.json: layer_types names {len(types)} layers, expected "
      f"{layers} (num_hidden_layers)."
    )
  if unknown_types := set(types) - {_FULL, _SLIDING}:
    raise ValueError(
      "config.json: layer_types names "
      f"{', '.join(map(repr, sorted(unknown_types)))}, "
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


def _expert_fields(config: Any) -> dict[str, Any]:
  """Returns the fields of `Architecture` about experts."""
  experts = config.num_experts
  active = config.num_experts_per_tok
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
  """Returns the indices of the layers without rotary positions."""
  layers = config.num_hidden_layers
  # 1 where a layer is rotated, despite the key's name.
  rotated = getattr(config, "no_rope_layers", [1] * layers)
  if len(rotated) < layers:
    raise ValueError(
      f"config.json: no_rope_layers names {len(rotated)} layers, expected "
      f"{layers} (num_hidden_layers)."
    )
  return tuple(i for i in range(layers) if not rotated[i])


def _field_names(dataclass: type) -> list[str]:
  return [field.name for field in dataclasses.fields(dataclass)]


def _unscaled_theta(rope: Mapping[str, Any]) -> float:
  """Returns theta of the windowed layers, whose RoPE must not be scaled."""
  theta, scaling = _rope(rope)
  if scaling is not None:
    raise ValueError(
      f"config.json: RoPE type {scaling.kind!r} of {_SLIDING} is not "
      "supported; expected 'default'."
    )
  return theta


def _rope(
  rope: Mapping[str, Any],
) -> tuple[float, architecture_lib.Rope | None]:
  """Returns theta and scaling of `rope_parameters`."""
  kind = rope.get("rope_type", "default")
  if kind not in ("default", *_SCALINGS):
    raise ValueError(
      f"config.json: RoPE type {kind!r} is not supported; expected 'default', "
      "'linear', 'llama3' or 'yarn'."
    )
  settings = {name: _field_names(x) for name, x in _SCALINGS.items()}
  hf_config.check_keys(
    rope,
    understood={"rope_type", "type", "rope_theta", *_YARN_SCALES}.union(
      *settings.values()
    ),
    only={"partial_rotary_factor": _ALLOWED_VALUES["partial_rotary_factor"]},
  )
  hf_config.check_types(rope, {"rope_theta": hf_config.NUMBER})
  theta = float(rope["rope_theta"])
  if kind == "default":
    return theta, None
  if kind == "yarn":
    rope = _with_yarn_defaults(rope)
  kinds = {
    key: _SETTING_KINDS.get(key, hf_config.NUMBER) for key in settings[kind]
  }
  hf_config.check_types(rope, kinds)
  scaling = _SCALINGS[kind](**{key: rope[key] for key in kinds})
  if isinstance(scaling, architecture_lib.Llama3Rope):
    low = scaling.low_freq_factor
    high = scaling.high_freq_factor
    if low >= high:
      raise ValueError(
        f"config.json: low_freq_factor is {low}, expected below "
        f"high_freq_factor, {high}: between the two, frequencies are blended."
      )
  if isinstance(scaling, architecture_lib.YarnRope):
    fast = scaling.beta_fast
    slow = scaling.beta_slow
    if scaling.factor < 1 or fast < slow or theta <= 1:
      raise ValueError(
        f"config.json: YaRN of factor {scaling.factor}, beta_fast {fast}, "
        f"beta_slow {slow} and rope_theta {theta}; expected a factor of at "
        "least 1, a beta_fast of at least beta_slow and a rope_theta above 1."
      )
  return theta, scaling


def _with_yarn_defaults(rope: Mapping[str, Any]) -> dict[str, Any]:
  """Returns YaRN's settings with the defaults of transformers."""
  settings = {k: v for k, v in rope.items() if v is not None or k == "truncate"}
  scales = [key for key in _YARN_SCALES if key in settings]
  numbers = dict.fromkeys(("factor", *scales), hf_config.NUMBER)
  hf_config.check_types(settings, numbers)

  def magnitude(scale: float = 1.0) -> float:
    return 0.1 * scale * math.log(settings["factor"]) + 1

  attention_factor = magnitude()
  if len(scales) == len(_YARN_SCALES):
    attention_factor = magnitude(settings["mscale"])
    attention_factor /= magnitude(settings["mscale_all_dim"])
  return {
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": True,
    "attention_factor": attention_factor,
    **settings,
  }


def to_hf(
  architecture: architecture_lib.Architecture, **extra: Any
) -> dict[str, Any]:
  """Returns a `config.json` for a policy without a source folder.

  Args:
    architecture: the policy's, whose adapters are left out.
    **extra: further values of the file, such as `eos_token_id`.
  """
  a = architecture
  rope: dict[str, Any] = {"rope_type": "default", "rope_theta": a.rope_theta}
  if a.rope_scaling is not None:
    rope |= dataclasses.asdict(a.rope_scaling)
    rope["rope_type"] = a.rope_scaling.kind
  activation = {"hidden_act": "silu"}
  if a.gelu:
    activation = {}
    extra["hidden_activation"] = "gelu_pytorch_tanh"
    extra["query_pre_attn_scalar"] = round(a.head_dim / a.query_scale**2)
  family = families.FAMILIES[a.family]
  if family.layer_ropes:
    rope = {_FULL: rope}
    if a.windowed:
      rope[_SLIDING] = {"rope_type": "default", "rope_theta": a.windowed_theta}
  if family.windows:
    extra["layer_types"] = [
      _SLIDING if i in a.windowed else _FULL for i in range(a.layers)
    ]
    # transformers needs a number, also where no layer has a window.
    extra["sliding_window"] = a.window or a.max_context
  if a.family == "smollm3":
    extra["no_rope_layers"] = [
      int(i not in a.unrotated) for i in range(a.layers)
    ]
  if a.experts:
    extra |= {
      "num_experts": a.experts,
      "num_local_experts": a.experts,
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
    **activation,
    "rms_norm_eps": a.norm_eps,
    "rope_parameters": rope,
    "rope_theta": a.rope_theta,
    "max_position_embeddings": a.max_context,
    "tie_word_embeddings": a.tied,
    "attention_bias": a.o_bias,
    "mlp_bias": a.mlp_bias,
    **extra,
  }
