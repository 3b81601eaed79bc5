"""Low-rank adapters: computation against PEFT, and export."""

from __future__ import annotations

import copy
import dataclasses

import jax
import numpy as np
import pytest
import random_models
import safetensors.numpy
import small_policy
import transformers

from anysearch_jax import config as config_lib
from anysearch_jax.policy import architecture as architecture_lib
from anysearch_jax.policy import decoder, hf, lora, sharding, table
from anysearch_jax.policy import parameters as weights
from anysearch_jax.policy import tokenizer as tokenizer_lib

ALL = architecture_lib.Lora(
  rank=4, alpha=6.0, targets=config_lib.LoraConfig().targets
)
SOME = architecture_lib.Lora(rank=3, alpha=1.0, targets=("v", "q", "down"))
ATTENTION = architecture_lib.Lora(
  rank=3, alpha=1.0, targets=("q", "k", "v", "o")
)
CASES = [("qwen3-tied", SOME), ("llama-biased", ALL), ("gpt-oss", ATTENTION)]
CASES += [("qwen3-moe", ATTENTION), ("olmo3", ALL), ("gemma3-biased", ALL)]


@pytest.fixture(scope="module")
def peft(torch):
  return pytest.importorskip(
    "peft", reason="adapter tests need peft==0.21.2 (the extra [oracles])"
  )


def adapted(policy, settings):
  """Returns the policy with random adapters that change its output."""
  a = dataclasses.replace(policy.architecture, lora=settings)
  drawn = small_policy.noisy(lora.initialize(a, 0), 1, scale=0.2)
  params = lora.combine(policy.params, drawn)
  return policy._replace(params=params, architecture=a)


@pytest.fixture(scope="module", params=CASES, ids=lambda c: c[0])
def pair(request, peft, make_pair, tmp_path_factory):
  """Our adapted policy, and PEFT's reading of its adapter folder."""
  import pairs

  case, settings = request.param
  base = make_pair(case).policy
  policy = adapted(base, settings)
  folder = tmp_path_factory.mktemp("adapter")
  hf.save_adapter(folder, policy, base=str(base.source))
  model = peft.AutoPeftModelForCausalLM.from_pretrained(
    folder, is_trainable=True
  )
  return pairs.Pair(model, policy)


def test_peft_reads_our_adapters_each_once(peft, pair):
  read = peft.get_peft_model_state_dict(pair.model)
  a = pair.policy.architecture
  tensors = list(weights.tensors(table.adapter_rows(a)))
  assert read.keys() == {name for name, _, _ in tensors}
  assert len(tensors) == 2 * len(a.lora.targets) * a.layers
  for name, row, layer in tensors:
    ours = np.asarray(weights.get(pair.policy.params, row.path)[layer])
    np.testing.assert_array_equal(read[name].numpy(), row.to_file(ours))


def test_logits_with_adapters_equal_peft(pair):
  tokens = random_models.random_tokens((4, 96))
  ours = pair.ours(tokens)
  np.testing.assert_allclose(ours, pair.theirs(tokens), rtol=0, atol=1e-4)
  with pair.model.disable_adapter():
    without = pair.theirs(tokens)
  assert np.abs(ours - without).max() > 0.5


def test_gradients_of_adapters_equal_peft(pair):
  sequence = random_models.random_tokens((2, 49))
  compared = 0
  for name, ours, theirs in pair.gradients(sequence):
    scale = np.abs(theirs).max()
    assert scale > 0
    np.testing.assert_allclose(
      ours, theirs, rtol=0, atol=3e-5 * scale, err_msg=name
    )
    compared += 1
  a = pair.policy.architecture
  assert compared == 2 * len(a.lora.targets) * a.layers


def test_merged_export_gives_the_same_logits_in_transformers(
  torch, pair, tmp_path
):
  tokens = random_models.random_tokens((4, 96))
  hf.save(tmp_path / "merged", pair.policy)
  reloaded = transformers.AutoModelForCausalLM.from_pretrained(
    tmp_path / "merged"
  )
  with torch.no_grad():
    theirs = reloaded(torch.tensor(tokens)).logits.numpy()
  np.testing.assert_allclose(pair.ours(tokens), theirs, rtol=0, atol=1e-4)

  ours = reloaded.state_dict()
  merged = copy.deepcopy(pair.model).merge_and_unload().state_dict()
  assert ours.keys() == merged.keys()
  for name, value in merged.items():
    torch.testing.assert_close(ours[name], value, rtol=0, atol=1e-6)
  assert hf.load(tmp_path / "merged").architecture.lora is None


def test_a_fresh_adapter_changes_nothing():
  plain = random_models.architecture("llama-biased")
  a = dataclasses.replace(plain, lora=ALL)
  params = random_models.params(plain)
  fresh = lora.combine(params, lora.initialize(a, 3))
  run = jax.jit(decoder.forward, static_argnums=1)
  row = random_models.one_segment(random_models.random_tokens((2, 16)))
  np.testing.assert_array_equal(run(fresh, a, *row), run(params, plain, *row))


def test_new_adapter_has_the_standard_deviation_of_peft(peft, make_pair):
  wide = peft.LoraConfig(r=64, target_modules=["q_proj", "o_proj", "down_proj"])
  model = peft.get_peft_model(
    transformers.AutoModelForCausalLM.from_pretrained(
      make_pair("llama").policy.source
    ),
    wide,
  )
  theirs = peft.get_peft_model_state_dict(model)
  a = dataclasses.replace(
    random_models.architecture("llama"),
    lora=architecture_lib.Lora(64, 8.0, ("q", "o", "down")),
  )
  ours = lora.initialize(a, 0)
  for name, row, layer in weights.tensors(table.adapter_rows(a)):
    leaf = weights.get(ours, row.path)[layer]
    if "lora_B" in name:
      assert not leaf.any() and not theirs[name].any()
    else:
      assert leaf.std() == pytest.approx(theirs[name].std().item(), rel=0.1)


def test_adapters_on_a_mesh_export_as_from_one_device(tmp_path):
  a = random_models.architecture("llama-biased")
  tokenizer = tokenizer_lib.Tokenizer(random_models.tokenizer())
  policy = adapted(hf.Policy(random_models.params(a), a, tokenizer), ALL)
  mesh = sharding.mesh(fsdp=4, tensor=2)
  spread = jax.device_put(
    policy.params, sharding.shardings(policy.architecture, mesh)
  )
  q, o = (spread[table.LAYERS][key] for key in ("q_lora_a", "o_lora_b"))
  # The model axis of 32 is sharded over 4 devices.
  assert q.addressable_shards[0].data.shape == (2, 8, 4)
  assert o.addressable_shards[0].data.shape == (2, 4, 8)
  hf.save_adapter(tmp_path / "one", policy, base="b")
  hf.save_adapter(tmp_path / "mesh", policy._replace(params=spread), base="b")
  files = sorted(path.name for path in (tmp_path / "one").iterdir())
  assert files == ["adapter_config.json", "adapter_model.safetensors"]
  for name in files:
    one, other = (tmp_path / side / name for side in ("one", "mesh"))
    assert one.read_bytes() == other.read_bytes(), name
  held = safetensors.numpy.load_file(tmp_path / "one" / files[1])
  assert {value.dtype for value in held.values()} == {np.dtype(np.float32)}


def test_architecture_gets_the_configured_adapters():
  a = random_models.architecture("qwen3")
  config = config_lib.LoraConfig(4, 6.0, ("down", "v"))
  with_adapters = lora.attach(a, config)
  adapters = architecture_lib.Lora(4, 6.0, ("down", "v"))
  assert with_adapters == dataclasses.replace(a, lora=adapters)
  assert adapters.scale == 1.5
  assert with_adapters.without_lora() == a
  assert lora.attach(a, config_lib.LoraConfig(rank=0)) is a


def test_experts_have_no_adapters():
  a = random_models.architecture("qwen3-moe")
  config = config_lib.LoraConfig(rank=2, targets=("q", "up"))
  with pytest.raises(ValueError, match="found up, of which this policy has 6"):
    lora.attach(a, config)
