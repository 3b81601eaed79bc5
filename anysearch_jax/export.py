"""A run's policy as others read it: from a checkpoint to a Hugging Face folder.

A run folder has all that this takes: `checkpoints/`, `source/` (configuration
and tokenizer of the starting policy), `config.json`, `provenance.json`,
`prompts.json`, `evaluation/`. Adapters need the starting policy's weights too.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from anysearch_jax import config as config_lib
from anysearch_jax import tensor_files, weights
from anysearch_jax.evaluation import metrics, model_card, report
from anysearch_jax.policy import hf, lora, sharding, table
from anysearch_jax.training import checkpoint


def write(
  run: str | pathlib.Path,
  output: str | pathlib.Path,
  *,
  rollout: int | None = None,
  dtype: str = "bfloat16",
  shard_bytes: int = tensor_files.SHARD_BYTES,
  base: str | pathlib.Path = "",
  adapter: str | pathlib.Path = "",
  overwrite: bool = False,
) -> int:
  """Exports a run's policy, its adapters merged, with a model card.

  Args:
    run, rollout, base: as for `load_policy`.
    output: folder to write.
    dtype: of the weights: bfloat16, float16 or float32.
    shard_bytes: most bytes a file.
    adapter: folder to write the adapters to as PEFT reads them, "" for none.
    overwrite: replace folders that exist.

  Returns:
    The rollouts that the policy was trained.

  Raises:
    As `load_policy`, and ValueError for a folder that exists, or for an
    adapter folder where the run has no adapters.
  """
  run = pathlib.Path(run)
  for folder in filter(None, (output, adapter)):
    if pathlib.Path(folder).exists() and not overwrite:
      raise ValueError(f"{folder} exists; name another, or overwrite it.")
  rollout, config, policy = load_policy(run, rollout=rollout, base=base)
  if adapter:
    if policy.architecture.lora is None:
      raise ValueError(f"{run} has no adapters to write to {adapter}.")
    hf.save_adapter(adapter, policy, base=str(base or config.policy))
  text = card(run, config, rollout=rollout, dtype=dtype)
  hf.save(
    output,
    policy,
    dtype=dtype,
    shard_bytes=shard_bytes,
    texts={"README.md": text},
  )
  return rollout


def load_policy(
  run: str | pathlib.Path,
  *,
  rollout: int | None = None,
  base: str | pathlib.Path = "",
) -> tuple[int, config_lib.ExperimentConfig, hf.Policy]:
  """The policy of a checkpoint, over all of this process's devices.

  Args:
    run: the run's folder.
    rollout: of the checkpoint; None is the newest sound one.
    base: Hugging Face folder that the run's adapters stand beside; "" is the
      one that the run names. Unused without adapters.

  Returns:
    rollouts trained, the run's configuration, the policy (trained arrays in
    float32, a frozen base as the run held it).

  Raises:
    ValueError: a folder that is not a run's, or a base of other sizes.
    FileNotFoundError: no such checkpoint.
    checkpoint.DamagedError: it is damaged, or all are.
  """
  run = pathlib.Path(run)
  folder, source = run / "checkpoints", run / "source"
  if not source.is_dir():
    raise ValueError(
      f"{run}: no {source.name}/; expected the folder of a training run."
    )
  rollout = checkpoint.sound(folder, rollout)
  config = config_lib.from_dict(
    config_lib.ExperimentConfig,
    checkpoint.read_json(folder, rollout, "config"),
  )
  a, tokenizer = hf.describe(source)
  a = lora.attach(a, config.lora)
  mesh = sharding.mesh(fsdp=jax.local_device_count())
  rows = table.trainable_rows(a)
  like = weights.abstract(
    rows, weights.shardings(rows, mesh, sharding.RULES), jnp.float32
  )
  params = checkpoint.read(folder, rollout, "params", like)
  if a.lora is not None:
    beside = hf.load(
      base or config.policy, mesh=mesh, dtype=lora.base_dtype(config.lora)
    )
    if beside.architecture != a.without_lora():
      raise ValueError(
        f"{base or config.policy}: not the policy that {run} began with; name "
        "its folder."
      )
    params = lora.combine(beside.params, params)
  return rollout, config, hf.Policy(params, a, tokenizer, source)


def card(
  run: str | pathlib.Path,
  config: config_lib.ExperimentConfig,
  *,
  rollout: int,
  dtype: str,
) -> str:
  """The model card of a run's policy after `rollout` rollouts.

  Evaluations count where they are of this policy: of the run's own `policy/`,
  which is the last rollout's.
  """
  run = pathlib.Path(run)
  c = config.curriculum
  last = rollout == c.total_steps // c.steps_per_rollout
  rows = _evaluations(run) if last else []
  source = _json(run / "source" / "config.json")
  return model_card.render(
    config=config_lib.to_dict(config),
    provenance=_json(run / "provenance.json"),
    base_model=source.get("_name_or_path") or pathlib.Path(config.policy).name,
    rollout=rollout,
    dtype=dtype,
    evaluated_dtype=config.checkpoint.export_dtype,
    prompt=_json(run / "prompts.json").get("plain", ""),
    rows=rows,
  )


def _evaluations(run: pathlib.Path) -> list[metrics.Row]:
  """The run's evaluations of its own policy, by name."""
  rows = []
  for folder in sorted((run / "evaluation").glob("*")):
    evaluated = _json(folder / "config.json").get("policy", "")
    if (folder / "episodes.jsonl").is_file() and (
      pathlib.Path(evaluated).resolve() == (run / "policy").resolve()
    ):
      rows.append(report.load_row(folder.name, folder))
  return rows


def _json(path: pathlib.Path) -> Mapping[str, Any]:
  return json.loads(path.read_text()) if path.is_file() else {}
