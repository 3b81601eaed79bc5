"""The decoder against transformers, and its cached forward against itself."""

from __future__ import annotations

import dataclasses
import functools
import json
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
import transformers
from tokenizers import models, pre_tokenizers

from anysearch_jax import tensor_files, weights
from anysearch_jax.policy import architecture as architecture_lib
from anysearch_jax.policy import hf, table, transformer
from anysearch_jax.training import logprobs

VOCAB, ROWS, TOKENS = 61, 4, 96
SIZES = {
  "vocab_size": VOCAB,
  "hidden_size": 32,
  "intermediate_size": 48,
  "num_hidden_layers": 2,
  "num_attention_heads": 4,
  "num_key_value_heads": 2,
  "max_position_embeddings": 512,
}
FAMILIES = {
  "qwen2": ("Qwen2", {"rope_theta": 1e6}),
  "qwen3": ("Qwen3", {"head_dim": 16, "rope_theta": 1e6}),
  "llama": (
    "Llama",
    {
      "rms_norm_eps": 1e-5,
      # 96 tokens reach three times beyond the original context.
      "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
      },
    },
  ),
}
CASES = [("qwen2", False), ("qwen3", True), ("llama", False), ("llama", True)]


def tiny_tokenizer() -> transformers.PreTrainedTokenizerFast:
  words = {f"w{i}": i for i in range(VOCAB - 2)}
  special = {"<eos>": VOCAB - 2, "<pad>": VOCAB - 1}
  inner = tokenizers.Tokenizer(models.WordLevel(words | special, "w0"))
  inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
  return transformers.PreTrainedTokenizerFast(
    tokenizer_object=inner, eos_token="<eos>", pad_token="<pad>"
  )


@dataclasses.dataclass
class Case:
  """One random model twice, and the compiled functions of ours."""

  oracle: Any
  policy: hf.Policy

  @functools.cached_property
  def logits(self):
    """Jitted once: every test of a case uses rows of one shape."""
    a = self.policy.architecture

    @jax.jit
    def run(params, tokens, positions, segment_ids):
      hidden = transformer.forward(params, a, tokens, positions, segment_ids)
      return transformer.logits(params, hidden)

    return functools.partial(run, self.policy.params)


@pytest.fixture(scope="module", params=CASES, ids=lambda c: f"{c[0]}-{c[1]}")
def case(request, torch, tmp_path_factory) -> Case:
  return make_case(torch, *request.param, tmp_path_factory.mktemp("source"))


def make_case(torch, family, tied, folder, **sizes) -> Case:
  name, extra = FAMILIES[family]
  config = getattr(transformers, name + "Config")(
    **SIZES | extra | sizes, tie_word_embeddings=tied
  )
  model = getattr(transformers, name + "ForCausalLM")(config).float().eval()
  generator = torch.Generator().manual_seed(len(family) + tied)
  with torch.no_grad():
    for parameter in model.parameters():
      noise = torch.randn(parameter.shape, generator=generator)
      # Biases and norm scales too, which are born 0 and 1.
      parameter.copy_(0.15 * noise + (parameter.dim() == 1))
  model.save_pretrained(folder)
  tiny_tokenizer().save_pretrained(folder)
  return Case(model, hf.load(folder))


def random_tokens(shape=(ROWS, TOKENS)):
  return np.random.default_rng(5).integers(0, VOCAB, shape)


def one_segment(tokens):
  positions = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
  return tokens, positions, np.ones_like(tokens)


def oracle_logits(torch, model, tokens):
  with torch.no_grad():
    return model(torch.tensor(tokens)).logits.numpy()


def log_softmax(x):
  x = np.asarray(x, np.float64)
  return x - np.log(np.exp(x).sum(-1, keepdims=True))


def assert_parity(ours, theirs):
  assert np.abs(theirs).max() > 1  # Else a tolerance in units says little.
  np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)
  np.testing.assert_allclose(
    log_softmax(ours), log_softmax(theirs), rtol=0, atol=5e-5
  )


def test_logits_are_those_of_transformers(torch, case):
  tokens = random_tokens()
  ours = case.logits(*one_segment(tokens))
  assert_parity(ours, oracle_logits(torch, case.oracle, tokens))


def test_packed_segments_are_those_of_separate_rows(torch, case):
  tokens = random_tokens()
  positions = np.zeros_like(tokens)
  segments = np.zeros_like(tokens)
  stretches = [(0, 0, 40), (0, 40, 91), (1, 0, 96), (2, 0, 1), (2, 1, 60)]
  for segment, (row, start, end) in enumerate(stretches, start=1):
    positions[row, start:end] = np.arange(end - start)
    segments[row, start:end] = segment
  ours = case.logits(tokens, positions, segments)
  assert np.isfinite(ours).all()
  for row, start, end in stretches:
    alone = oracle_logits(torch, case.oracle, tokens[row : row + 1, start:end])
    assert_parity(ours[row, start:end], alone[0])


def test_an_export_is_read_by_transformers_whole(torch, case, tmp_path):
  hf.save(tmp_path / "out", case.policy)
  reloaded, report = transformers.AutoModelForCausalLM.from_pretrained(
    tmp_path / "out", output_loading_info=True
  )
  for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
    assert not report[kind], kind
  assert type(reloaded) is type(case.oracle)
  assert reloaded.config.max_position_embeddings == 512
  ours, theirs = reloaded.state_dict(), case.oracle.state_dict()
  assert ours.keys() == theirs.keys()
  for name in theirs:
    assert torch.equal(ours[name], theirs[name]), name
  tokens = random_tokens()
  np.testing.assert_array_equal(
    oracle_logits(torch, reloaded, tokens),
    oracle_logits(torch, case.oracle, tokens),
  )


def test_gradients_are_those_of_autograd(torch, tmp_path):
  # Tied: the embedding has gradients from both its ends. Deep enough that the
  # layers are a loop and not unrolled.
  made = make_case(torch, "qwen2", True, tmp_path, num_hidden_layers=5)
  sequence = random_tokens((2, 49))
  rng = np.random.default_rng(6)
  weight = rng.normal(size=(2, 48)).astype(np.float32)
  tokens, targets = sequence[:, :-1], sequence[:, 1:]
  a = made.policy.architecture

  @jax.jit
  @jax.value_and_grad
  def ours(params):
    logp, _ = logprobs.token_logprobs(
      params,
      a,
      tokens,
      targets,
      *one_segment(tokens)[1:],
      chunk=16,
      remat=True,
    )
    return jnp.sum(weight * logp)

  value, grads = ours(made.policy.params)
  logp = made.oracle(torch.tensor(tokens)).logits.log_softmax(-1)
  picked = logp.gather(-1, torch.tensor(targets)[..., None])[..., 0]
  loss = (picked * torch.tensor(weight)).sum()
  loss.backward()
  assert float(value) == pytest.approx(loss.item(), rel=1e-5)
  oracle = {n: p.grad.numpy() for n, p in made.oracle.named_parameters()}
  for row in table.rows(a):
    found = np.asarray(weights.get(grads, row.path))
    for i, name in enumerate(row.names()):
      expected = oracle.pop(name)
      back = row.to_file(found[i] if row.stacked else found)
      scale = np.abs(expected).max()
      assert scale > 0
      np.testing.assert_allclose(
        back, expected, rtol=0, atol=1e-5 * scale, err_msg=name
      )
  assert not oracle


ARCHITECTURES = [
  architecture_lib.from_hf(
    SIZES
    | extra
    | {"architectures": [name + "ForCausalLM"], "tie_word_embeddings": True}
  )
  for name, extra in FAMILIES.values()
]


def random_params(a):
  """Values large enough that a wrong position or mask shows."""
  rng = np.random.default_rng(0)
  return jax.tree.map(
    lambda p: jnp.asarray(p + 0.15 * rng.normal(size=p.shape), jnp.float32),
    transformer.initialize(a, 0),
  )


@pytest.mark.parametrize("a", ARCHITECTURES, ids=lambda a: a.family)
def test_cached_forward_is_the_full_forward(a):
  params = random_params(a)
  tokens = random_tokens((3, 40))
  full = jax.jit(transformer.forward, static_argnums=1)(
    params, a, *one_segment(tokens)
  )
  layers = transformer.layer_params(params, a)

  @jax.jit
  def extend(new, starts, caches):
    return transformer.extend(params, layers, a, new, starts, caches)

  prompts, chunk = np.array([19, 8, 26]), 8
  caches = transformer.empty_caches(a, 3, 48)
  done = np.zeros(3, np.int32)
  garbage = np.random.default_rng(1)
  seen = 0

  def step(take, width):
    """Appends `take` real tokens a row, padded with garbage to `width`."""
    nonlocal caches, done, seen
    new = garbage.integers(0, VOCAB, (3, width))
    for row, count in enumerate(take):
      new[row, :count] = tokens[row, done[row] : done[row] + count]
    hidden, caches = extend(jnp.asarray(new), jnp.asarray(done), caches)
    for row, count in enumerate(take):
      np.testing.assert_allclose(
        hidden[row, :count],
        full[row, done[row] : done[row] + count],
        rtol=0,
        atol=1e-5,
      )
    done = done + np.asarray(take, np.int32)
    seen += sum(take)

  while (done < prompts).any():
    step(np.minimum(prompts - done, chunk), chunk)
  for turn in range(10):
    # Rows pause and go on, as episodes do; a paused row writes garbage.
    step([1, turn % 2, 1], 1)
  np.testing.assert_array_equal(done, prompts + (10, 5, 10))
  assert seen == done.sum()


@pytest.fixture
def tiny(tmp_path):
  """A policy born here, saved in `folder`."""
  a = ARCHITECTURES[0]
  tokenizer = hf.tokenizer_lib.Tokenizer(tiny_tokenizer(), end_of_turn_ids=[3])
  policy = hf.Policy(random_params(a), a, tokenizer)
  hf.save(tmp_path / "policy", policy)
  return types.SimpleNamespace(folder=tmp_path / "policy", policy=policy)


def test_a_saved_folder_loads_as_it_was(tiny):
  loaded = hf.load(tiny.folder)
  jax.tree.map(np.testing.assert_array_equal, loaded.params, tiny.policy.params)
  assert loaded.architecture == tiny.policy.architecture
  assert loaded.tokenizer.end_of_turn_ids == {3, VOCAB - 2}
  assert loaded.tokenizer.encode("w5 w9") == [5, 9]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_rounds_each_weight_once(tiny, dtype):
  hf.save(tiny.folder, tiny.policy, dtype=np.dtype(dtype))
  config = json.loads((tiny.folder / "config.json").read_text())
  assert config["dtype"] == dtype
  jax.tree.map(
    lambda found, ours: np.testing.assert_array_equal(
      found, np.asarray(ours).astype(dtype).astype(np.float32)
    ),
    hf.load(tiny.folder).params,
    tiny.policy.params,
  )


def test_saving_replaces_the_folder_whole(tiny):
  (tiny.folder / "stale.safetensors").write_text("old")
  hf.save(tiny.folder, tiny.policy)
  assert not (tiny.folder / "stale.safetensors").exists()
  assert [p.name for p in tiny.folder.parent.iterdir()] == ["policy"]


def test_a_tied_folder_may_hold_its_head_again(tiny):
  path = tiny.folder / tensor_files.SINGLE_NAME
  untied = dataclasses.replace(tiny.policy.architecture, tied=False)
  head = np.zeros((VOCAB, 32), np.float32)
  tensor_files.save(path.parent, tiny.policy.params | {"head": head}, table.rows(untied))
  assert "head" not in hf.load(tiny.folder).params


@pytest.mark.parametrize(
  ("name", "sentence"),
  [
    ("config.json", "no config.json; expected a Hugging Face folder"),
    ("tokenizer.json", "no tokenizer.json; expected a Hugging Face folder"),
    ("model.safetensors", "model.safetensors: no such file"),
  ],
)
def test_a_folder_without_a_part_is_refused(tiny, name, sentence):
  (tiny.folder / name).unlink()
  with pytest.raises(ValueError, match=sentence):
    hf.load(tiny.folder)


def test_weights_of_another_model_are_refused(tiny):
  path = tiny.folder / "config.json"
  config = json.loads(path.read_text())
  path.write_text(json.dumps(config | {"tie_word_embeddings": False}))
  with pytest.raises(ValueError, match=r"lacks tensor 'lm_head.weight'"):
    hf.load(tiny.folder)
  path.write_text(json.dumps(config | {"num_hidden_layers": 1}))
  with pytest.raises(ValueError, match=r"unknown tensor 'model.layers.1"):
    hf.load(tiny.folder)
