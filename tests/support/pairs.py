"""The same model on both sides: transformers in torch, and this project."""

from __future__ import annotations

import copy
import functools
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import random_models
import torch

from anysearch_jax.policy import decoder, hf, table
from anysearch_jax.policy import parameters as weights
from anysearch_jax.training import logprobs


class Pair:
  """Computes logits and gradients of one model on both sides.

  Attributes:
    model: the model of transformers, in float32.
    policy: this project's policy with the same weights; adapters are allowed.
  """

  def __init__(self, model: torch.nn.Module, policy: hf.Policy):
    self.model, self.policy = model, policy

  @classmethod
  def random(cls, case: str, folder: pathlib.Path, **sizes: Any) -> Pair:
    """Makes a model of `random_models.CASES` and loads it from its folder."""
    model = random_models.make(case, folder, **sizes)
    return cls(model, hf.load(folder))

  def ours(
    self,
    tokens: np.ndarray,
    positions: np.ndarray | None = None,
    segment_ids: np.ndarray | None = None,
    *,
    params: decoder.Params | None = None,
    dtype: Any = jnp.float32,
  ) -> np.ndarray:
    """Returns this project's float32 logits `[B, T, V]`.

    By default each row is one segment, and the parameters are the policy's.
    """
    params = self.policy.params if params is None else params
    if positions is None:
      _, positions, segment_ids = random_models.one_segment(tokens)
    run = self._compiled(jnp.dtype(dtype))
    return np.asarray(run(params, tokens, positions, segment_ids))

  @functools.cache  # noqa: B019  (a pair lives as long as what it measures)
  def _compiled(self, dtype):
    a = self.policy.architecture

    @jax.jit
    def run(params, *row):
      hidden = decoder.forward(params, a, *row, compute=decoder.Compute(dtype))
      return decoder.logits(params, hidden)

    return run

  def theirs(
    self, tokens: np.ndarray, *, dtype: torch.dtype = torch.float32, **inputs
  ) -> np.ndarray:
    """Returns torch's float32 logits `[B, T, V]`; `inputs` go to the model."""
    model = self.model
    if dtype != torch.float32:
      model = copy.deepcopy(model).to(dtype)
    with torch.no_grad():
      inputs = {k: torch.tensor(v) for k, v in inputs.items()}
      return model(torch.tensor(tokens), **inputs).logits.float().numpy()

  def gradients(
    self, sequence: np.ndarray, **options: Any
  ) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Computes gradients of a weighted sum of the tokens' log-probabilities.

    Args:
      sequence: int `[B, T + 1]`; every token except the first is predicted.
      options: options of `logprobs.token_logprobs`.

    Yields:
      (name, our gradient, torch's gradient) for each trained tensor, both in
      the file's layout.
    """
    a = self.policy.architecture
    weight = np.random.default_rng(6).normal(size=sequence[:, 1:].shape)
    weight = weight.astype(np.float32)
    targets = sequence[:, 1:]
    tokens, positions, segment_ids = random_models.one_segment(sequence[:, :-1])
    rows = table.trainable_rows(a)

    @jax.jit
    @jax.grad
    def ours(changed, params):
      logp, _ = logprobs.token_logprobs(
        _replaced(params, changed),
        a,
        *map(jnp.asarray, (tokens, targets, positions, segment_ids)),
        **options,
      )
      return jnp.sum(weight * logp)

    params = self.policy.params
    changed = weights.tree(rows, lambda row: weights.get(params, row.path))
    found = ours(changed, params)

    logp = self.model(torch.tensor(tokens)).logits.log_softmax(-1)
    picked = logp.gather(-1, torch.tensor(targets)[..., None])[..., 0]
    named = {
      # PEFT inserts the adapter's name before `weight`.
      name.replace(".default.weight", ".weight"): parameter
      for name, parameter in self.model.named_parameters()
      if parameter.requires_grad
    }
    theirs = dict(
      zip(
        named,
        torch.autograd.grad(
          (picked * torch.tensor(weight)).sum(), list(named.values())
        ),
      )
    )
    names = {name for name, _, _ in weights.tensors(rows)}
    for name in [n for n in theirs if ".experts." in n and n not in names]:
      theirs |= _by_expert(name, theirs.pop(name))
    assert theirs.keys() == names
    for name, row, i in weights.tensors(rows):
      file = row.to_file(np.asarray(weights.get(found, row.path))[i])
      yield name, file, theirs[name].numpy()


def _by_expert(name: str, stacked) -> dict:
  """Returns the tensors of a file by name, of those that torch stacks."""
  stem, kind = name.rsplit(".", 1)
  keys = kind.removesuffix("_proj").split("_")
  return {
    f"{stem}.{expert}.{key}_proj.weight": part
    for expert, tensor in enumerate(stacked)
    for key, part in zip(keys, tensor.chunk(len(keys)), strict=True)
  }


def _replaced(params: decoder.Params, changed: decoder.Params):
  layers = params[table.LAYERS] | changed.get(table.LAYERS, {})
  return params | changed | {table.LAYERS: layers}


def log_softmax(logits: np.ndarray) -> np.ndarray:
  """Returns the log-softmax over the last axis, in float64."""
  logits = np.asarray(logits, np.float64)
  logits = logits - logits.max(-1, keepdims=True)
  return logits - np.log(np.exp(logits).sum(-1, keepdims=True))
