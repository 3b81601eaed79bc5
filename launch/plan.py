r"""Predicts whether a configuration fits hardware, which need not be present.

    python -m launch.plan --config=configs/qwen2_5_7b.py --target=h100:4 \
        --json=plan.json
    python -m launch.plan --config=configs/qwen3_4b.py --target=h100:1 \
        --config.mesh.fsdp=1 --config.mesh.tensor=1 \
        --config.mesh.trainer='()' --config.mesh.rollout='()'

Compiles the train step, the pass for old log-probabilities, prefill and decode
ahead of time and prints the memory and the predicted time of each and of the
hand-over, the time of a whole optimizer step, a verdict, and what would make it
fit. The exit code is 0 if the configuration fits, 1 if it does not, and 2 if
the flags or the configuration are invalid. Needs the compilers of the extra
[plan], but no accelerator.

    python -m launch.plan --config=configs/qwen2_5_7b.py --target=h100:4 \
        --cluster --search_seconds=0.5
    python -m launch.plan --config=configs/quickstart.py --run=runs/x --cluster

--cluster simulates a run on 8 to 1,024 devices and prints the best split
between training and sampling: copies of the planned trainer and sampler, or of
those of a run that was made with --timeline.
"""

from __future__ import annotations

import functools
import json
import os
import pathlib
import sys

from absl import app, flags

from anysearch_jax import config as config_lib
from anysearch_jax.host import captured_stderr, json_files
from anysearch_jax.launch import flags as launch_flags
from anysearch_jax.launch import shipped

_SHAPES = shipped.ROOT / "configs" / "shapes"


def define_flags() -> None:
  launch_flags.define_config()
  flags.DEFINE_string(
    "target", None, "Hardware and how much of it: h100:4, h200:1, v5p:2x2x1."
  )
  flags.DEFINE_bool("cluster", False, "Simulate clusters of such hardware.")
  flags.DEFINE_list(
    "devices", [str(8 << i) for i in range(8)], "Of clusters, with --cluster."
  )
  flags.DEFINE_string(
    "run",
    None,
    "With --cluster: folder of a run made with --timeline, whose parts it has "
    "more of, each counted as one device; instead of --target.",
  )
  flags.DEFINE_float("search_seconds", 0.5, "Of a search, with --cluster.", 0)
  flags.DEFINE_integer(
    "episode_tokens",
    None,
    "Of an average episode, with passages; default: 2,560, or a shorter row.",
  )
  flags.DEFINE_integer(
    "generated_tokens",
    None,
    "Of --episode_tokens, those sampled; default: 800, or half if less.",
  )
  flags.DEFINE_string("json", None, "File that the plan is written to.")
  flags.DEFINE_string(
    "before", None, "An earlier plan's --json, to show its seconds beside."
  )


def main(argv) -> None:
  # A plan does not depend on the devices present. JAX reads this on import;
  # without it, the CUDA plug-in would look for a driver.
  os.environ["JAX_PLATFORMS"] = "cpu"
  # Keeps warnings, because the partitioner's are counted; drops information.
  os.environ["TF_CPP_MIN_LOG_LEVEL"] = "1"
  made, shown, cluster = None, [], {}
  f = flags.FLAGS
  try:
    if (f.run is None) == (f.target is None):
      raise app.UsageError(
        "expected either --target, the hardware to plan for, or --run, a run "
        "to simulate more of."
      )
    for n in f.devices:
      if not n.isdecimal() or not int(n):
        raise ValueError(f"--devices: found {n!r}, expected numbers above 0.")
    before = None
    if path := f.before:
      before = json_files.read(pathlib.Path(path)).get("step_seconds")
      if before is None:
        raise ValueError(
          f"--before: {path} has no seconds of a step; expected what --json of "
          "another plan wrote."
        )
    config = launch_flags.read_config()
    if f.run is None:
      made, work = _plan(config)
      from anysearch_jax.planning import plan

      shown = [plan.text(made, before=before)]
    else:
      work, sentence = _run(config, pathlib.Path(f.run))
      shown = [sentence]
    if work:
      cluster, table = _clusters(work, config.seed)
      shown += ["", *table]
    print("\n".join(shown))
    if path := f.json:
      values = json.loads(plan.to_json(made)) if made else {}
      pathlib.Path(path).write_text(json_files.text(values | cluster))
  except (ModuleNotFoundError, OSError, ValueError) as error:
    raise app.UsageError(str(error)) from error
  sys.exit(0 if made is None or made.fits else 1)


def _plan(config: config_lib.ExperimentConfig):
  """Returns a plan, and the workload to simulate if that is asked for."""
  with captured_stderr.standard_error():  # JAX warns of missing plugins.
    from anysearch_jax.planning import clusters, planner, targets, whole_step
    from anysearch_jax.training import validation

  f = flags.FLAGS
  target = targets.parse(f.target)
  validation.validate(config)
  a = read_architecture(config.policy)
  expected = whole_step.episodes_of(
    config, tokens=f.episode_tokens, generated=f.generated_tokens
  )
  log = functools.partial(print, file=sys.stderr, flush=True)
  made = planner.make(config, a, target, expected=expected, log=log)
  if not (f.cluster and made.step):
    return made, None
  seconds = f.search_seconds
  return made, clusters.planned(made, a, expected, search_seconds=seconds)


def _run(config: config_lib.ExperimentConfig, folder: pathlib.Path):
  """Returns the workload of a run, and how well it is simulated."""
  with captured_stderr.standard_error():
    from anysearch_jax.planning import clusters, simulation

  work, measured = clusters.measured(folder, config, seed=config.seed)
  found = simulation.run(work, 1, 1, seed=config.seed)
  return work, (
    f"{folder}: {measured:,.1f} rollouts an hour; simulated with this "
    f"configuration: {found.rollouts_an_hour:,.1f}."
  )


def _clusters(work, seed: int):
  """Simulates the best splits; returns JSON values and lines of a table.

  Devices that would make a run less than 1 % faster stay idle.
  """
  from anysearch_jax.planning import simulation
  from anysearch_jax.report import tables

  found, fields, last = {}, simulation.Result._fields, None
  rows = [["devices", *(name.replace("_", " ") for name in fields)]]
  for text in flags.FLAGS.devices:
    best = simulation.best_split(work, int(text), seed=seed)
    if last and last.training + last.sampling <= int(text):
      best = best if best and best.seconds < 0.99 * last.seconds else last
    last = best
    found[int(text)] = best and best._asdict()
    shown = [f"{x:,.{0 if isinstance(x, int) else 2}f}" for x in best or ()]
    rows.append([text, *shown])
    rows[-1] += [""] * (len(rows[0]) - len(rows[-1]))
  return {"cluster": found}, tables.aligned(rows)


def read_architecture(policy: str):
  """Returns the architecture of a Hugging Face folder or of a known model.

  Raises:
    ValueError: the folder has no config.json and the name is unknown.
  """
  from anysearch_jax.policy import architecture

  for path in (
    pathlib.Path(policy) / "config.json",
    _SHAPES / f"{pathlib.Path(policy).name}.json",
  ):
    if path.is_file():
      return architecture.from_hf(json_files.read(path))
  known = ", ".join(sorted(path.stem for path in _SHAPES.glob("*.json")))
  raise ValueError(
    f"policy: {policy!r} is no folder with a config.json, nor one of {known} "
    "in configs/shapes/."
  )


if __name__ == "__main__":
  define_flags()
  launch_flags.run(main)
