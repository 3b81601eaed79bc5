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
"""

from __future__ import annotations

import functools
import os
import pathlib
import sys

from absl import app, flags

from anysearch_jax import config as config_lib
from anysearch_jax.host import captured_stderr, json_files
from launch import flags as launch_flags
from launch import shipped

_SHAPES = shipped.ROOT / "configs" / "shapes"


def define_flags() -> None:
  launch_flags.define_config()
  flags.DEFINE_string(
    "target", None, "Hardware and how much of it: h100:4, h200:1, v5p:2x2x1."
  )
  flags.mark_flag_as_required("target")
  flags.DEFINE_integer(
    "episode_tokens",
    None,
    "Tokens of an average episode, its prompt and passages included; default: "
    "2,560, or a training row if that is shorter.",
  )
  flags.DEFINE_integer(
    "generated_tokens",
    None,
    "Of an episode's tokens, those that the policy samples; default: 800, or "
    "half of the episode if that is less.",
  )
  flags.DEFINE_string("json", None, "File that the plan is written to.")
  flags.DEFINE_string(
    "before",
    None,
    "An earlier plan's --json, whose seconds of a step are shown beside.",
  )


def main(argv) -> None:
  # A plan does not depend on the devices present. JAX reads this on import;
  # without it, the CUDA plug-in would look for a driver.
  os.environ["JAX_PLATFORMS"] = "cpu"
  # Keeps warnings, because the partitioner's are counted; drops information.
  os.environ["TF_CPP_MIN_LOG_LEVEL"] = "1"
  try:
    if len(argv) > 1:
      raise app.UsageError(f"Unexpected argument {argv[1]!r}.")
    before = None
    if path := flags.FLAGS.before:
      before = json_files.read(pathlib.Path(path)).get("step_seconds")
      if before is None:
        raise ValueError(
          f"--before: {path} has no seconds of a step; expected what --json of "
          "another plan wrote."
        )
    made = _plan(launch_flags.read_config())
  except (app.UsageError, ModuleNotFoundError, OSError, ValueError) as error:
    print(f"launch.plan: {error}", file=sys.stderr)
    sys.exit(2)
  from anysearch_jax.planning import plan

  print(plan.text(made, before=before))
  if path := flags.FLAGS.json:
    try:
      pathlib.Path(path).write_text(plan.to_json(made))
    except OSError as error:
      print(f"launch.plan: {error}; the plan is above.", file=sys.stderr)
      sys.exit(2)
  sys.exit(0 if made.fits else 1)


def _plan(config: config_lib.ExperimentConfig):
  with captured_stderr.standard_error():  # JAX warns of missing plugins.
    from anysearch_jax.planning import planner, targets, whole_step
    from anysearch_jax.training import validation

  f = flags.FLAGS
  target = targets.parse(f.target)
  validation.validate(config)
  a = read_architecture(config.policy)
  expected = whole_step.episodes_of(
    config, tokens=f.episode_tokens, generated=f.generated_tokens
  )
  log = functools.partial(print, file=sys.stderr, flush=True)
  return planner.make(config, a, target, expected=expected, log=log)


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
