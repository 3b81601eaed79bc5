"""Mutated configurations are refused, or read exactly as transformers does.

ANYSEARCH_CONFIG_CASES sets the number of cases per family; the default is 10.
"""

from __future__ import annotations

import collections
import copy
import functools
import json
import os

import numpy as np
import pytest
import random_models
import transformers

from anysearch_jax.policy import decoder, hf

CASES = int(os.environ.get("ANYSEARCH_CONFIG_CASES", "10"))
CONTEXT = 48  # Longer than the original context of Llama's scaled RoPE.

LLAMA3 = {
  "rope_type": "llama3",
  "rope_theta": 1e4,
  "factor": 4.0,
  "low_freq_factor": 1.0,
  "high_freq_factor": 4.0,
  "original_max_position_embeddings": 16,
}
ROPES = [
  None,
  {},
  {"type": "default", "factor": 2.0},
  {"rope_type": "default", "rope_theta": 1e3},
  {"rope_type": "default", "partial_rotary_factor": 0.5},
  {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 16},
  LLAMA3,
  {k: v for k, v in LLAMA3.items() if not k.startswith("original")},
  {k: v for k, v in LLAMA3.items() if k != "rope_theta"},
  LLAMA3 | {"low_freq_factor": 8.0},
  LLAMA3 | {"factor": 0.5},
]
# Valid and nearly valid values by key.
VALUES = {
  "architectures": [[], ["Qwen2ForCausalLM"], ["LlamaForCausalLM"]],
  "model_type": ["qwen2", "qwen3", "llama", "mistral", ""],
  "hidden_act": ["swish", "gelu", "silu", "SiLU"],
  "rms_norm_eps": [1e-2, 1e-5, 0.0, 1],
  "rope_theta": [1e3, 500000, 0, -1.0],
  "rope_scaling": ROPES,
  "rope_parameters": [
    *ROPES,
    {"full_attention": LLAMA3, "sliding_attention": ROPES[3]},
    {"full_attention": None, "sliding_attention": LLAMA3},
    {"sliding_attention": {"type": "default"}},
  ],
  "layer_types": [
    ["full_attention"] * 2,
    ["full_attention", "sliding_attention"],
    ["full_attention"],
  ],
  "sliding_window": [8, 0, -1, 4096],
  "use_sliding_window": [True, False],
  "max_window_layers": [0, 1, 28, -1],
  "num_attention_heads": [2, 8, 3],
  "num_key_value_heads": [1, 4, 3],
  "num_hidden_layers": [1, 3],
  "head_dim": [8, 16, 4, 7],
  "hidden_size": [16, 64],
  "vocab_size": [61, 72, 60],
  "max_position_embeddings": [8, 4096],
  "original_max_position_embeddings": [8, 512],
  "partial_rotary_factor": [0.5, 1.0],
  "is_causal": [False, True, None],
  "attention_bias": [True],
  "mlp_bias": [True],
  "tie_word_embeddings": [True, False],
  "quantization_config": [{"quant_method": "fp8"}, {}],
  "eos_token_id": [3, [3, 4]],
  "num_experts": [4],
  "num_experts_per_tok": [1, 3, 7, 0],
  "moe_intermediate_size": [24, 12],
  "norm_topk_prob": [True, False],
  "decoder_sparse_step": [1, 2],
  "mlp_only_layers": [[], [0]],
  "no_rope_layers": [None, [0, 0], [1, 0, 1], [1], [2, 1]],
  "no_rope_layer_interval": [1, 2, 0],
  "sliding_window_pattern": [1, 2, 0],
  "rope_local_base_freq": [1e3, 0],
  "query_pre_attn_scalar": [16, 8],
  "hidden_activation": ["gelu", "gelu_pytorch_tanh"],
  "use_bidirectional_attention": [True, False],
  "attn_logit_softcapping": [30.0],
  "final_logit_softcapping": [30.0],
}
ANY = [None, True, 0, -1, 0.5, "", "x", [], {}, float("nan")]


class Family:
  """A small random model in a folder; its configuration can be replaced."""

  def __init__(self, case, folder):
    self.prefix, _ = random_models.CASES[case]
    self.folder = folder
    random_models.make(case, folder)
    new = json.loads((folder / "config.json").read_text())
    old = {k: v for k, v in new.items() if k != "rope_parameters"}
    rope = new["rope_parameters"]
    rope = dict(rope.get("full_attention", rope))
    old["rope_theta"] = rope.pop("rope_theta")
    old["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    self.dialects = old, new
    self.tokens = random_models.random_tokens((2, CONTEXT))
    # Most configurations that load have the same architecture.
    self._logits = functools.lru_cache(maxsize=None)(self._of_architecture)

  def mutated(self, number):
    rng = np.random.default_rng([1, number])
    config = copy.deepcopy(self.dialects[rng.integers(2)])
    for _ in range(rng.integers(1, 4)):
      key = str(rng.choice([*VALUES, *config]))
      match rng.integers(8):
        case 0:
          config.pop(key, None)
        case 1:
          config[key] = None
        case 2:
          config[key] = ANY[rng.integers(len(ANY))]
        case _:
          values = VALUES.get(key, ANY)
          config[key] = copy.deepcopy(values[rng.integers(len(values))])
    return config

  def write(self, config):
    (self.folder / "config.json").write_text(json.dumps(config))

  def ours(self):
    """Returns our logits; raises ValueError if the folder is refused."""
    a, _ = hf.describe(self.folder)
    return self._logits(a)

  def _of_architecture(self, a):
    params = hf.load(self.folder).params
    hidden = decoder.forward(params, a, *random_models.one_segment(self.tokens))
    return np.asarray(decoder.logits(params, hidden))

  def theirs(self, torch, config):
    """Returns the logits of transformers, or None if it refuses the folder."""
    kind = transformers.AutoModelForCausalLM
    if "model_type" not in config:
      kind = getattr(transformers, f"{self.prefix}ForCausalLM")
    try:
      model = kind.from_pretrained(self.folder, dtype=torch.float32)
      with torch.no_grad():
        return model.eval()(torch.tensor(self.tokens)).logits.numpy()
    except Exception:  # Its checks and layers raise many types of errors.
      return None


@pytest.mark.parametrize(
  "case",
  [
    *("qwen2", "qwen3", "qwen3-moe", "llama", "smollm3", "olmo3"),
    *("gemma3-tied", "gpt-oss"),
  ],
)
def test_a_mutated_configuration_is_refused_or_read_as_transformers_reads_it(
  torch, tmp_path, case
):
  transformers.logging.set_verbosity_error()
  family, found = Family(case, tmp_path), collections.Counter()
  for number in range(CASES):
    config = family.mutated(number)
    family.write(config)
    try:
      ours = family.ours()
    except ValueError as refusal:
      said = str(refusal)
      assert said.startswith(str(tmp_path)) and said.endswith(".")
      found["refused"] += 1
      continue
    theirs = family.theirs(torch, config)
    if theirs is None:
      found["refused by transformers alone"] += 1
      continue
    found["agree"] += 1
    np.testing.assert_allclose(
      ours, theirs, rtol=0, atol=1e-4, err_msg=f"case {number}: {config}"
    )
  assert found["agree"] and found["refused"]
