"""Tests bytes between devices against those of rings, counted by hand."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import planned
import pytest

from anysearch_jax.planning import collectives, compilation, programs, targets

pytestmark = pytest.mark.usefixtures("optimized")

# Four devices along `tensor`, two along `fsdp`; each device has one block.
SHAPE, BLOCK = (2, 4), (64, 128)
BYTES = 64 * 128 * 4
TARGETS = ("cpu", "h100:8", "v5e:2x4")


@functools.cache
def place(name: str) -> tuple[targets.Target, jax.sharding.Mesh]:
  if name == "cpu":
    return planned.target(8), planned.mesh(jax.devices(), *SHAPE)
  planned.need(name)
  target = targets.parse(name)
  return target, planned.mesh(targets.devices(target), *SHAPE)


def traffic(name, function, *, trips=1):
  """Returns the traffic of one call of a per-device function on a block.

  A function with a second argument, `used`, gets a number that only the
  device knows.
  """
  target, mesh = place(name)
  spec = jax.P(planned.AXES, None)
  cut = jax.shard_map(
    function,
    mesh=mesh,
    in_specs=(spec, jax.P()),
    out_specs=spec,
    check_vma=False,
  )
  rows = BLOCK[0] * mesh.size
  args = tuple(
    jax.ShapeDtypeStruct(shape, dtype, sharding=jax.NamedSharding(mesh, of))
    for shape, dtype, of in (
      ((rows, BLOCK[1]), jnp.float32, spec),
      ((), jnp.int32, jax.P()),
    )
  )
  program = programs.Program("p", jax.jit(cut), args, {}, 1, trips, {})
  part = compilation.measure(program, [program], target)
  return {k: tuple(t) for k, t in part.traffic.items()}


def passed_on(x):
  return jax.lax.ppermute(x, "tensor", [(i, (i + 1) % 4) for i in range(4)])


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize(
  ("function", "kind", "blocks"),
  [
    (lambda x, _: jax.lax.all_gather(x, "tensor", tiled=True), "all-gather", 3),
    (
      lambda x, _: jax.lax.psum_scatter(x, "tensor", tiled=True),
      "reduce-scatter",
      3 / 4,
    ),
    (lambda x, _: jax.lax.psum(x, "tensor"), "all-reduce", 2 * 3 / 4),
    (lambda x, _: jax.lax.psum(x, planned.AXES), "all-reduce", 2 * 7 / 8),
    (
      lambda x, _: jax.lax.all_to_all(x, "tensor", 0, 1, tiled=True),
      "all-to-all",
      3 / 4,
    ),
    (lambda x, _: passed_on(x), "collective-permute", 1),
  ],
)
def test_a_collective_sends_what_a_ring_does(name, function, kind, blocks):
  assert traffic(name, function) == {kind: (1, blocks * BYTES)}


@pytest.mark.parametrize("name", TARGETS)
def test_collectives_in_loops_count_for_each_iteration(name):
  def body(_, x):
    return jnp.sin(jax.lax.psum(x, "tensor"))

  def f(x, used):
    def outer(_, x):
      return jax.lax.fori_loop(0, 5, body, x)

    # Five in a loop of three, and five after it.
    return outer(0, jax.lax.fori_loop(0, used, outer, x))

  assert traffic(name, f, trips=3) == {"all-reduce": (20, 20 * 1.5 * BYTES)}


@pytest.mark.parametrize("name", TARGETS)
def test_a_conditional_counts_the_branch_that_sends_most(name):
  def f(x, used):
    return jax.lax.cond(
      used > 0, lambda x: jax.lax.psum(x, "tensor") * 2, passed_on, x
    )

  assert traffic(name, f) == {"all-reduce": (1, 1.5 * BYTES)}


@pytest.mark.parametrize(
  ("attributes", "size"),
  [
    ("replica_groups={{0,1},{2,3}}, dimensions={0}", 2),
    ("replica_groups=[2,4]<=[8], dimensions={0}", 4),
    ("replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_1'}", 4),
    ("replica_groups=mesh['a'=2,'b'=2,'c'=3] {'c','a'}", 6),
    (
      "replica_groups=mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'a'}, x=1",
      2,
    ),
    ("replica_groups=mesh['a'=8] {'a':(2)4}", 4),
    ("replica_groups={}, dimensions={0}", 8),
  ],
)
def test_groups_are_read_in_every_syntax(attributes, size):
  assert collectives.group_size(attributes, 8) == size


@pytest.mark.parametrize(
  ("kind", "size"),
  [
    ("bf16[8]{0:T(8,128)(2,1)S(1)}", 16),
    ("pred[5]", 5),
    ("s4[6]", 3),
    ("f8e4m3fn[7]", 7),
    ("f32[]", 4),
    ("token[]", 0),
    ("(f32[2]{0}, (s8[3], /*index=2*/u32[]{:S(8)}))", 15),
  ],
)
def test_the_bytes_of_a_type(kind, size):
  assert collectives.size(kind) == size


# Syntax of the TPU compiler: asynchronous pairs, a reduction fused with the
# slicing of its result, a bound in the loop's state, attributes over several
# lines, other threads.
TPU = """\
HloModule jit_f, num_partitions=4

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}

%all-reduce-scatter.1 (input: bf16[8,4]) -> bf16[4,4] {
  %input = bf16[8,4]{1,0} parameter(0)
  %all-reduce.1 = bf16[8,4]{1,0} all-reduce(%input), replica_groups={{0,1},{2,3}}, to_apply=%add
  %zero = s32[] constant(0)
  ROOT %cut = bf16[4,4]{1,0} dynamic-slice(%all-reduce.1, %zero, %zero), dynamic_slice_sizes={4,4}
}

%wrapped (p: f32[6]) -> f32[6] {
  %p = f32[6]{0} parameter(0)
  ROOT %all-to-all = f32[6]{0} all-to-all(%p), replica_groups={{0,1},{2,3}}
}, execution_thread="sparsecore"

%body (state: (s32[], bf16[8,4], s32[])) -> (s32[], bf16[8,4], s32[]) {
  %state = (s32[], bf16[8,4]{1,0}, s32[]) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %bound.1 = s32[] get-tuple-element(%state), index=2
  %array = bf16[8,4]{1,0} get-tuple-element(%state), index=1
  %kernel = bf16[8,4]{1,0} custom-call(%array), custom_call_target="k", metadata={
"text":"{\\"block\\": 512
}}, operand_layout_constraints={}
  %scattered = bf16[4,4]{1,0} fusion(%kernel), kind=kCustom, calls=%all-reduce-scatter.1
  %start = ((bf16[4,4]{1,0}), bf16[8,4]{1,0}) all-gather-start(%scattered), replica_groups={{0,1},{2,3}}
  %done = bf16[8,4]{1,0} all-gather-done(%start)
  ROOT %next = (s32[], bf16[8,4]{1,0}, s32[]) tuple(%i, %done, %bound.1)
}

%condition (state.1: (s32[], bf16[8,4], s32[])) -> pred[] {
  %state.1 = (s32[], bf16[8,4]{1,0}, s32[]) parameter(0)
  %i.1 = s32[] get-tuple-element(%state.1), index=0
  %bound.2 = s32[] get-tuple-element(%state.1), index=2
  ROOT %less = pred[] compare(%i.1, %bound.2), direction=LT
}

ENTRY %main (a: bf16[8,4], b: f32[6]) -> f32[6] {
  %a = bf16[8,4]{1,0} parameter(0)
  %b = f32[6]{0} parameter(1)
  %from = s32[] constant(0)
  %to = s32[] constant(7)
  %copied = s32[] copy(%to)
  %first = (s32[], bf16[8,4]{1,0}, s32[]) tuple(%from, %a, %copied)
  %loop = (s32[], bf16[8,4]{1,0}, s32[]) while(%first), condition=%condition, body=%body
  %async = ((f32[6]{0}), f32[6]{0}, u32[]) async-start(%b), async_execution_thread="sparsecore", calls=%wrapped
  ROOT %end = f32[6]{0} async-done(%async)
}
"""  # noqa: E501


def elements(text):
  """Writes elements of tuples as newer compilers do: `%state#2`."""
  get = r"\n  %([\w.]+) = .* get-tuple-element\((%[\w.]+)\), index=(\d+)"
  for name, whole, index in re.findall(get, text):
    text = re.sub(rf"%{name}(?![\w.\-])", f"{whole}#{index}", text)
  return re.sub(r"\n.*get-tuple-element.*", "", text)


@pytest.mark.parametrize("text", [TPU, elements(TPU)], ids=["get", "#"])
def test_a_module_with_the_syntax_of_the_tpu_compiler(text):
  found = collectives.count(text, trips=100)
  whole = 8 * 4 * 2
  assert found == {
    "reduce-scatter": (7, 7 * whole / 2),
    "all-gather": (7, 7 * whole / 2),
    "all-to-all": (1, 24 / 2),
  }


def test_a_loop_without_a_known_bound_runs_trips_times():
  unknown = TPU.replace("%to = s32[] constant(7)", "%to = s32[] foo(%b)")
  found = collectives.count(unknown, trips=100)
  assert found["all-gather"].operations == 100


def test_a_sharding_that_no_collective_reaches_is_counted():
  planned.need("h100")
  target = targets.parse("h100:4")
  mesh = planned.mesh(targets.devices(target), 2, 2)

  def f(x):
    # From rows sharded over both axes to columns over one of them.
    columns = jax.NamedSharding(mesh, jax.P(None, "fsdp"))
    x = jnp.sin(jax.lax.with_sharding_constraint(x, columns)).reshape(8, 8, 6)
    return jax.lax.with_sharding_constraint(
      x, jax.NamedSharding(mesh, jax.P("tensor", "fsdp"))
    )

  rows = jax.NamedSharding(mesh, jax.P(planned.AXES))
  x = jax.ShapeDtypeStruct((64, 6), jnp.float32, sharding=rows)
  bad = programs.Program("p", jax.jit(f), (x,), {}, 1, 1, {})
  good = bad._replace(fn=jax.jit(jnp.sin))
  assert compilation.measure(bad, [bad], target).replications >= 1
  assert compilation.measure(good, [good], target).replications == 0
