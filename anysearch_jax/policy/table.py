"""The parameter table of a decoder: the one place that names its weights."""

from __future__ import annotations

from anysearch_jax import weights
from anysearch_jax.policy import architecture as architecture_lib

LAYERS = "layers"


def rows(a: architecture_lib.Architecture) -> list[weights.Weight]:
  """Every parameter of `a`: path, shape, logical axes, file name and layout."""
  d, f, n, k, h = a.d_model, a.mlp_dim, a.heads, a.kv_heads, a.head_dim
  table = [
    weights.Weight(
      path=("embed",),
      shape=(a.vocab_size, d),
      axes=("vocab", "model"),
      name="model.embed_tokens.weight",
      split=(a.vocab_size, d),
      perm=(0, 1),
      file_shape=(a.vocab_size, d),
      init=0.02,
    )
  ]

  def layer(path, shape, axes, name, *, split, perm, file_shape, init):
    table.append(
      weights.Weight(
        path=(LAYERS, *path),
        shape=(a.layers, *shape),
        axes=("layers", *axes),
        name="model.layers.{layer}." + name,
        split=split,
        perm=perm,
        file_shape=file_shape,
        init=init,
      )
    )

  def norm(path, size, name):
    layer(
      path,
      (size,),
      (None,),
      name,
      split=(size,),
      perm=(0,),
      file_shape=(size,),
      init=None,
    )

  residual_std = 0.02 / (2 * a.layers) ** 0.5
  norm(("attention_norm",), d, "input_layernorm.weight")
  for part, count, axis in (("q", n, "heads"), ("k", k, "kv"), ("v", k, "kv")):
    layer(
      (part,),
      (d, count, h),
      ("model", axis, "head_dim"),
      f"self_attn.{part}_proj.weight",
      split=(count, h, d),
      perm=(2, 0, 1),
      file_shape=(count * h, d),
      init=0.02,
    )
    if a.qkv_bias:
      layer(
        (part + "_bias",),
        (count, h),
        (axis, "head_dim"),
        f"self_attn.{part}_proj.bias",
        split=(count, h),
        perm=(0, 1),
        file_shape=(count * h,),
        init=0.0,
      )
    if a.qk_norm and part != "v":
      norm((part + "_norm",), h, f"self_attn.{part}_norm.weight")
  layer(
    ("o",),
    (n, h, d),
    ("heads", "head_dim", "model"),
    "self_attn.o_proj.weight",
    split=(d, n, h),
    perm=(1, 2, 0),
    file_shape=(d, n * h),
    init=residual_std,
  )
  norm(("mlp_norm",), d, "post_attention_layernorm.weight")
  for part in ("gate", "up"):
    layer(
      (part,),
      (d, f),
      ("model", "mlp"),
      f"mlp.{part}_proj.weight",
      split=(f, d),
      perm=(1, 0),
      file_shape=(f, d),
      init=0.02,
    )
  layer(
    ("down",),
    (f, d),
    ("mlp", "model"),
    "mlp.down_proj.weight",
    split=(d, f),
    perm=(1, 0),
    file_shape=(d, f),
    init=residual_std,
  )
  table.append(
    weights.Weight(
      path=("norm",),
      shape=(d,),
      axes=(None,),
      name="model.norm.weight",
      split=(d,),
      perm=(0,),
      file_shape=(d,),
      init=None,
    )
  )
  if not a.tied:
    table.append(
      weights.Weight(
        path=("head",),
        shape=(a.vocab_size, d),
        axes=("vocab", "model"),
        name="lm_head.weight",
        split=(a.vocab_size, d),
        perm=(0, 1),
        file_shape=(a.vocab_size, d),
        init=0.02,
      )
    )
  return table
