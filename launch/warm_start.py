"""Trains the quickstart's policy from scratch on supervised demonstrations.

    python -m launch.warm_start --config=configs/quickstart.py

Writes a Hugging Face folder (default: config.policy). Held-out demonstrations
first check that the policy makes the decisions that reinforcement learning
builds on; a policy that fails is written to `<folder>.rejected`.
"""

from __future__ import annotations

import sys
import time

from absl import app, flags

from anysearch_jax import config as config_lib
from launch import flags as launch_flags
from launch import jax_setup, progress, shipped


def define_flags() -> None:
  """Defines the command's flags; importing the module defines none."""
  launch_flags.define_config()
  flags.DEFINE_string("output", None, "Folder; default config.policy.")
  launch_flags.define_process()


def main(argv) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"Unexpected argument {argv[1]!r}.")
  config = launch_flags.read_config()
  jax_setup.configure(threads=flags.FLAGS.threads, cache=flags.FLAGS.cache)
  import numpy as np

  from anysearch_jax.policy import architecture as architecture_lib
  from anysearch_jax.policy import decoder, hf
  from anysearch_jax.policy import tokenizer as tokenizer_lib
  from anysearch_jax.training import validation
  from anysearch_jax.world import demonstrations as demonstrations_lib
  from anysearch_jax.world import warm_start, world_tokenizer
  from launch import world_source

  w = config.warm_start
  folder = flags.FLAGS.output or config.policy
  if not flags.FLAGS.output and shipped.is_shipped(folder):
    raise app.UsageError(
      f"--output: found nothing, and {folder} belongs to the installation; "
      "expected a folder of yours."
    )
  if not folder:
    raise app.UsageError(
      "--output: found nothing, expected a folder (or one in config.policy)."
    )
  try:
    validation.validate(config, trains=False, samples=False)
    warm_start.validate(w)
    source = world_source.make(config.data, config.retrieval.kind)
  except ValueError as error:
    sys.exit(f"launch.warm_start: {error}")
  codec = tokenizer_lib.Tokenizer(world_tokenizer.build_tokenizer(source.world))
  a = architecture_lib.Architecture(
    family="qwen3",
    vocab_size=codec.vocab_size,
    d_model=w.hidden,
    layers=w.layers,
    heads=w.heads,
    kv_heads=w.kv_heads,
    head_dim=w.hidden // w.heads,
    mlp_dim=w.mlp,
    qk_norm=True,
    tied=True,
  )
  demonstrations = _demonstrations(config, source, codec)
  line = progress.Line(w.steps, unit="step", clock=time.monotonic)
  params = warm_start.fit(
    decoder.initialize(a, config.seed),
    a,
    _around(demonstrations, config.seed),
    config=w,
    optimizer=config.optimizer,
    batch=config.batch,
    on_step=lambda step, loss: line.tick(step, f"loss {loss:.3f}"),
  )
  probes = warm_start.probe(
    params,
    a,
    demonstrations_lib.probe_sets(
      demonstrations_lib.Setting(
        source.world, source.retriever.lookup, codec, config.episode
      ),
      "dev",
      count=600,
      seed=config.seed,
    ),
  )
  for kind, p in probes.items():
    print(f"P({kind}) {p:.3f}")
  lacks = warm_start.gate(probes)
  if lacks:
    folder += ".rejected"
  hf.save(folder, hf.Policy(params, a, codec), dtype=np.float16)
  print(f"policy: {folder}")
  if lacks:
    sys.exit("The warm start is too weak: " + "; ".join(lacks) + ".")


def _demonstrations(config: config_lib.ExperimentConfig, source, codec) -> list:
  """Makes the pool: training questions, budgets 0 to 8, 40% with scaffold."""
  import numpy as np

  from anysearch_jax.world import demonstrations as demonstrations_lib
  from anysearch_jax.world import warm_start

  count = config.warm_start.demonstrations
  rng = np.random.Generator(np.random.PCG64(config.seed))
  line = progress.Line(count, unit="demonstration", clock=time.monotonic)
  pool = []
  setting = demonstrations_lib.Setting(
    source.world, source.retriever.lookup, codec, config.episode
  )
  for question in source.questions("train", count, config.seed):
    trajectory, weights = demonstrations_lib.demonstrate(
      question,
      setting,
      budget=int(rng.integers(0, 9)),
      scaffold=bool(rng.random() < 0.4),
      rng=rng,
      decision_weight=config.warm_start.decision_weight,
    )
    pool.append(warm_start.Demonstration(trajectory.token_ids, weights))
    line.tick(len(pool))
  return pool


def _around(pool: list, seed: int):
  """Yields the pool endlessly, in a new order on each pass."""
  import numpy as np

  rng = np.random.Generator(np.random.PCG64(seed))
  while True:
    for i in rng.permutation(len(pool)):
      yield pool[i]


if __name__ == "__main__":
  define_flags()
  launch_flags.run(main)
