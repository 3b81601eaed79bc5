r"""Predicts whether a configuration fits hardware, which need not be present.

    anysearch plan --config=configs/qwen2_5_7b.py --target=h100:4 \
        --json=plan.json
    anysearch plan --config=configs/qwen3_4b.py --target=h100:1 \
        --config.mesh.fsdp=1 --config.mesh.tensor=1 \
        --config.mesh.trainer='()' --config.mesh.rollout='()'

Compiles the train step, the pass for old log-probabilities, prefill and decode
ahead of time and prints the memory of each and of the hand-over, the predicted
seconds of an optimizer step at an assumed share of the devices' peaks, and a
verdict. The exit code is 0 if the configuration fits, 1 if it does not, and 2
if the flags or the configuration are invalid. Needs the compilers of the extra
[plan], but no accelerator.
"""

from __future__ import annotations

import functools
import os
import pathlib
import sys
from typing import TYPE_CHECKING

from absl import app, flags

from anysearch_jax import config as config_lib
from anysearch_jax.host import captured_stderr, json_files
from anysearch_jax.launch import flags as launch_flags
from anysearch_jax.launch import shipped

if TYPE_CHECKING:
  from anysearch_jax.planning import plan as plan_lib

_SHAPES = shipped.ROOT / "configs" / "shapes"


def define_flags() -> None:
  launch_flags.define_config()
  flags.DEFINE_string(
    "target",
    None,
    "Hardware and how much of it: h100:4, h200:1, v5p:2x2x1.",
    required=True,
  )
  flags.DEFINE_integer(
    "episode_tokens",
    None,
    "Tokens of an average episode, with its passages; default: 2,560, or the "
    "row length if that is shorter. Seconds of a step depend on it.",
  )
  flags.DEFINE_integer(
    "generated_tokens",
    None,
    "How many of --episode_tokens are sampled; default: 800, or half of them "
    "if that is less.",
  )
  flags.DEFINE_string(
    "json", None, "Also write the plan to this file, as JSON."
  )


def main(argv) -> None:
  # A plan does not depend on the devices present. JAX reads this on import;
  # without it, the CUDA plug-in would look for a driver.
  os.environ["JAX_PLATFORMS"] = "cpu"
  os.environ["TF_CPP_MIN_LOG_LEVEL"] = "1"
  try:
    plan = _plan(launch_flags.read_config())
    from anysearch_jax.planning import plan as plan_lib

    print(plan_lib.text(plan))
    if path := flags.FLAGS.json:
      pathlib.Path(path).write_text(plan_lib.to_json(plan))
  except (ModuleNotFoundError, OSError, ValueError) as error:
    raise app.UsageError(str(error)) from error
  sys.exit(0 if plan.fits else 1)


def _plan(config: config_lib.ExperimentConfig) -> plan_lib.Plan:
  """Returns the plan of a configuration for the target of the flags."""
  with captured_stderr.standard_error():  # JAX warns of missing plugins.
    from anysearch_jax.planning import plan as plan_lib
    from anysearch_jax.planning import targets, whole_step

  f = flags.FLAGS
  target = targets.parse(f.target)
  from anysearch_jax.methods import systems  # Imports JAX.

  systems.validate(config)
  return plan_lib.make(
    config,
    read_architecture(config.policy),
    target,
    expected=whole_step.episodes_of(
      config, tokens=f.episode_tokens, generated=f.generated_tokens
    ),
    log=functools.partial(print, file=sys.stderr, flush=True),
  )


def read_architecture(policy: str):
  """Returns the architecture of a Hugging Face folder or of a known model.

  Raises:
    ValueError: the folder has no config.json and the name is unknown.
  """
  from anysearch_jax.policy import hf_architecture

  for path in (
    pathlib.Path(policy) / "config.json",
    _SHAPES / f"{pathlib.Path(policy).name}.json",
  ):
    if path.is_file():
      return hf_architecture.from_hf(json_files.read(path))
  shape_names = ", ".join(sorted(path.stem for path in _SHAPES.glob("*.json")))
  raise ValueError(
    f"policy: {policy!r} is no folder with a config.json, nor one of "
    f"{shape_names} in configs/shapes/."
  )


if __name__ == "__main__":
  define_flags()
  launch_flags.run(main)
