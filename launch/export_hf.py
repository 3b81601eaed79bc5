"""Exports a training run's policy as a Hugging Face folder.

    anysearch export_hf --checkpoint=runs/x/checkpoints --output=DIR
    anysearch export_hf --checkpoint=runs/x@3 --output=DIR --dtype=float32

Writes sharded safetensors, the configuration, tokenizer and chat template of
the starting policy, and a model card made from the run. The folder appears
complete or not at all. LoRA adapters are merged into the weights of the
starting policy; `--adapter=DIR` also writes them as a PEFT folder.

The trained weights are held in float32 on the available devices; if these are
too small, set JAX_PLATFORMS=cpu.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from absl import flags

from anysearch_jax.launch import flags as launch_flags
from anysearch_jax.launch import jax_setup, policies


def define_flags() -> None:
  policies.define_checkpoint(required=True)
  flags.DEFINE_string(
    "output", None, "Hugging Face folder to write.", required=True
  )
  flags.DEFINE_enum(
    "dtype",
    "bfloat16",
    ["bfloat16", "float16", "float32"],
    "Type of the weights in the files.",
  )
  flags.DEFINE_string(
    "base",
    "",
    "Folder of the starting policy of a LoRA run, if it has moved; default: "
    "config.policy of the run.",
  )
  flags.DEFINE_string(
    "base_model",
    "",
    "owner/name of the starting policy on the hub, for the card; default: as "
    "in the path of the hub's cache.",
  )
  flags.DEFINE_string(
    "adapter",
    "",
    "Folder for the adapters of a LoRA run, in PEFT's form; default: none.",
  )
  flags.DEFINE_bool("overwrite", False, "Replace an earlier export.")
  launch_flags.define_process()


def main(argv: Sequence[str]) -> None:
  f = flags.FLAGS
  jax_setup.configure(threads=f.threads, cache=f.cache)
  from anysearch_jax.export import hf_export
  from anysearch_jax.host import run_lock
  from anysearch_jax.training import checkpoint

  run, checkpoint_rollout = policies.parse_checkpoint(f.checkpoint)
  with run_lock.hold(run_lock.path_beside(f.output)):
    try:
      names = ("dtype", "base", "base_model", "adapter", "overwrite")
      options: dict[str, Any] = {name: f[name].value for name in names}
      rollout = hf_export.write(
        run, f.output, rollout=checkpoint_rollout, **options
      )
    except checkpoint.DamagedError as error:
      raise ValueError(str(error)) from error
  print(f"policy after {rollout} rollouts: {f.output}")


if __name__ == "__main__":
  define_flags()
  launch_flags.run(main)
