"""The private names of JAX that `attention/cudnn.py` uses still exist."""

from __future__ import annotations

import inspect

import jax
import jax.numpy as jnp
import pytest

from anysearch_jax.policy.attention import cudnn

_MOVED = (
  "jax {} changed {!r} of jax._src.cudnn.fused_attention_stablehlo; adapt "
  "anysearch_jax/policy/attention/cudnn.py, the only file that uses it."
)


def _moved(name: str) -> str:
  return _MOVED.format(jax.__version__, name)


@pytest.mark.parametrize(
  ("name", "arguments"),
  [
    (
      "dot_product_attention",
      (
        *("query", "key", "value", "q_seqlen", "kv_seqlen"),
        *("q_offsets", "kv_offsets", "scale", "mask_type"),
      ),
    ),
    ("check_cudnn_version", ()),
    ("check_compute_capability", ("capability",)),
    ("is_cuda_compute_capability_equal", ("capability",)),
  ],
)
def test_functions_take_the_arguments_that_are_passed(name, arguments):
  function = getattr(cudnn._fused, name, None)
  assert callable(function), _moved(name)
  parameters = inspect.signature(function).parameters
  assert set(arguments) <= set(parameters), _moved(name)
  if name != "dot_product_attention":
    assert tuple(parameters) == arguments, _moved(name)


def test_mask_and_primitive_exist():
  assert hasattr(cudnn._fused.MaskType, "PADDING_CAUSAL"), _moved("MaskType")
  name = "_dot_product_attention_fwd_p_wrapper"
  assert hasattr(cudnn._fused, name), _moved(name)


def test_lowering_asks_the_target_and_then_the_device_again():
  before = cudnn._fused.check_compute_capability
  with pytest.raises(RuntimeError, match="within"), cudnn.lowering(9.0):
    assert cudnn._fused.check_compute_capability("9.0")
    assert not cudnn._fused.check_compute_capability("10.0")
    assert cudnn._fused.is_cuda_compute_capability_equal("9.0")
    raise RuntimeError("within")
  assert cudnn._fused.check_compute_capability is before


def test_the_forward_pass_is_recognised():
  q = jax.ShapeDtypeStruct((1, 64, 2, 64), jnp.bfloat16)
  lengths = jax.ShapeDtypeStruct((1, 2), jnp.int32)
  offsets = jax.ShapeDtypeStruct((1, 3), jnp.int32)
  with cudnn.lowering(9.0):
    jaxpr = jax.make_jaxpr(
      lambda q, lengths, offsets: cudnn.packed_attention(
        q, q, q, lengths=lengths, offsets=offsets
      )
    )(q, lengths, offsets)

  def primitives(jaxpr):
    for equation in jaxpr.eqns:
      yield equation.primitive
      for value in equation.params.values():
        inner = getattr(value, "jaxpr", value)
        if hasattr(inner, "eqns"):
          yield from primitives(inner)

  found = [cudnn.is_forward(p) for p in primitives(jaxpr.jaxpr)]
  assert found.count(True) == 1, _moved("dot_product_attention")
