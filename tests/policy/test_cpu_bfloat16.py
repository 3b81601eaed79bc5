"""bfloat16 on a CPU: the numbers, and what XLA is asked for."""

from __future__ import annotations

import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from anysearch_jax.policy import cpu_bfloat16

# The largest relative error of rounding to bfloat16, which keeps 8 bits.
_ROUNDING = 2.0**-8
# (x, weight, axes, out_axes_first), as the layers of a policy contract them.
CASES = {
  "in axes first": ((2, 5, 24), (24, 3, 8), 1, False),
  "two in axes": ((2, 5, 3, 8), (3, 8, 24), 2, False),
  "out axes first": ((2, 5, 24), (3, 8, 24), 1, True),
  "a matrix": ((7, 24), (24, 16), 1, False),
  "a lone row": ((1, 1, 24), (24, 3, 8), 1, False),
}


def arrays(x_shape, weight_shape):
  rng = np.random.default_rng(0)
  x, weight = rng.normal(size=x_shape), rng.normal(size=weight_shape)
  return jnp.asarray(x, jnp.bfloat16), jnp.asarray(weight, jnp.bfloat16)


def in_float64(x, weight, axes, out_axes_first):
  """The product of the same numbers by NumPy."""
  x, weight = (np.asarray(y, np.float64) for y in (x, weight))
  if not out_axes_first:
    return np.tensordot(x, weight, axes)
  last = tuple(range(-axes, 0))
  return np.tensordot(x, weight, (last, last))


@pytest.mark.parametrize("case", CASES)
def test_a_product_is_the_exact_one_rounded_once(case):
  x_shape, weight_shape, axes, out_axes_first = CASES[case]
  x, weight = arrays(x_shape, weight_shape)
  found = cpu_bfloat16.project(x, weight, axes, out_axes_first=out_axes_first)
  expected = in_float64(x, weight, axes, out_axes_first)
  chex.assert_type(found, jnp.bfloat16)
  chex.assert_shape(found, expected.shape)
  # Sums are made in float32, so that only the last rounding is seen.
  np.testing.assert_allclose(
    np.asarray(found, np.float64), expected, rtol=_ROUNDING, atol=1e-5
  )


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_the_exact_ones_rounded_once(case):
  x_shape, weight_shape, axes, out_axes_first = CASES[case]
  x, weight = arrays(x_shape, weight_shape)
  project = functools.partial(
    cpu_bfloat16.project, axes=axes, out_axes_first=out_axes_first
  )
  y, pull = jax.vjp(lambda x, weight: project(x, weight), x, weight)
  cotangent = jnp.asarray(
    np.random.default_rng(1).normal(size=y.shape), jnp.bfloat16
  )
  found = pull(cotangent)
  # The same numbers in float32, where `project` is `jnp.tensordot`.
  wide = [each.astype(jnp.float32) for each in (x, weight, cotangent)]
  _, pull = jax.vjp(lambda x, weight: project(x, weight), *wide[:2])
  for gradient, exact, like in zip(found, pull(wide[2]), (x, weight)):
    chex.assert_trees_all_equal_shapes_and_dtypes(gradient, like)
    np.testing.assert_allclose(
      np.asarray(gradient, np.float64),
      np.asarray(exact, np.float64),
      rtol=_ROUNDING,
      atol=1e-5,
    )


def test_every_product_has_bfloat16_factors_and_a_float32_sum():
  x, weight = arrays((4, 24), (24, 16))

  def loss(x, weight):
    return cpu_bfloat16.project(x, weight, 1).astype(jnp.float32).sum()

  text = jax.jit(jax.grad(loss, (0, 1))).lower(x, weight).as_text()
  kinds = re.findall(r"dot_general.*: \((.*)\) -> (\S+)", text)
  assert len(kinds) == 2  # Of `x` and of `weight`; the value is not needed.
  for factors, result in kinds:
    assert factors.count("xbf16>") == 2, factors
    assert result.endswith("xf32>"), result


def test_a_lone_row_is_multiplied_beside_a_row_of_zeros():
  x, weight = arrays((1, 24), (24, 16))
  product = jax.jit(lambda x: cpu_bfloat16.project(x, weight, 1))
  assert "tensor<2x16xf32>" in product.lower(x).as_text()
  assert product(x).shape == (1, 16)


def test_softmax_and_its_derivative_are_those_of_the_definition():
  rng = np.random.default_rng(0)
  scores = rng.normal(size=(3, 5, 7))
  cotangent = rng.normal(size=(3, 5, 7))
  softmax = functools.partial(cpu_bfloat16.softmax, dtype=jnp.bfloat16)
  probs, pull = jax.vjp(softmax, jnp.asarray(scores, jnp.float32))
  (found,) = pull(jnp.asarray(cotangent, jnp.float32))
  expected = np.exp(scores)
  expected /= expected.sum(-1, keepdims=True)
  np.testing.assert_allclose(probs, expected, rtol=1e-5)
  # The row of probabilities p has the Jacobian diag(p) - p p^T.
  jacobian = np.eye(7) * expected[..., None] - np.einsum(
    "...i,...j->...ij", expected, expected
  )
  exact = np.einsum("...ij,...j->...i", jacobian, cotangent)
  np.testing.assert_allclose(found, exact, atol=1e-6)


def test_a_masked_score_has_no_derivative():
  scores = jnp.array([[0.3, -1e30, 1.2]])
  gradient = jax.grad(lambda x: cpu_bfloat16.softmax(x, jnp.bfloat16)[0, 0])(
    scores
  )
  assert gradient[0, 1] == 0
  assert np.isfinite(gradient).all()


def test_rows_and_their_gradient_are_those_of_indexing():
  table = arrays((6, 4), (1,))[0]
  ids = jnp.array([[1, 5, 1], [0, 1, 2]])
  cotangent = jnp.arange(24, dtype=jnp.bfloat16).reshape(2, 3, 4)
  found, pull = jax.vjp(lambda x: cpu_bfloat16.rows(x, ids), table)
  (gradient,) = pull(cotangent)
  chex.assert_trees_all_equal(found, table[ids])
  expected = np.zeros((6, 4))
  np.add.at(expected, np.asarray(ids), np.asarray(cotangent, float))
  chex.assert_trees_all_equal_shapes_and_dtypes(gradient, table)
  np.testing.assert_allclose(
    np.asarray(gradient, float), expected, rtol=_ROUNDING
  )


def test_a_program_for_other_devices_is_jaxs_own():
  """As `planning.compilation` traces it, on a machine without these devices."""
  gpu = jax.sharding.AbstractDevice(
    device_kind="NVIDIA H100", num_cores=None, platform="gpu"
  )
  mesh = jax.sharding.AbstractMesh((), (), abstract_device=gpu)
  assert cpu_bfloat16.is_used(jnp.bfloat16)
  assert not cpu_bfloat16.is_used(jnp.float32)
  with jax.sharding.use_abstract_mesh(mesh):
    assert not cpu_bfloat16.is_used(jnp.bfloat16)
