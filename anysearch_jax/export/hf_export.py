"""Exports a run's policy from a checkpoint to a Hugging Face folder.

The inputs are in the run's folder: `checkpoints/`, `source/` (configuration and
tokenizer of the starting policy), `provenance.json`, `prompts.json`,
`evaluation/`. A run with adapters also needs the starting policy's weights.
"""

from __future__ import annotations

import functools
import itertools
import pathlib

import huggingface_hub
import jax
import jax.numpy as jnp
import yaml
from absl import logging

from anysearch_jax import config as config_lib
from anysearch_jax.config import settings as config_settings
from anysearch_jax.evaluation import metrics
from anysearch_jax.export import model_card
from anysearch_jax.host import json_files
from anysearch_jax.policy import hf, lora, sharding, table, tensor_files
from anysearch_jax.policy import parameters as weights
from anysearch_jax.report import loading
from anysearch_jax.training import checkpoint

# Reads a JSON file, {} if it is missing.
_json = functools.partial(json_files.read, missing={})


def write(
  run: str | pathlib.Path,
  output: str | pathlib.Path,
  *,
  rollout: int | None = None,
  dtype: str = "bfloat16",
  shard_bytes: int = tensor_files.SHARD_BYTES,
  base: str | pathlib.Path = "",
  base_model: str = "",
  adapter: str | pathlib.Path = "",
  overwrite: bool = False,
) -> int:
  """Exports a run's policy with a model card; adapters are merged.

  Args:
    run: the run's folder.
    output: folder to write.
    rollout: number of the checkpoint; None: the newest undamaged one.
    dtype: type of the weights: bfloat16, float16 or float32.
    shard_bytes: maximum size of a file in bytes.
    base: as for `load_policy`.
    base_model: the hub's name of the starting policy, for the card. If "", the
      name is read from the folder's path if that is in the hub's cache;
      otherwise it is the folder's name.
    adapter: folder to write the adapters to, in PEFT's format; "" for none.
    overwrite: whether to replace earlier exports.

  Returns:
    The number of rollouts that the policy was trained on.

  Raises:
    ValueError: also if a folder must not be written, if `adapter` is given but
      the run has no adapters, or if `base_model` is not a valid name.
    Other errors are those of `load_policy`.
  """
  run = pathlib.Path(run)
  rollout, config = _checkpoint(run, rollout)
  start = base or config.policy
  _check_targets(run, start, output, adapter, overwrite=overwrite)
  if adapter and not config.lora.rank:
    raise ValueError(
      f"{run}: found a run that trained every weight; expected one with "
      f"adapters to write to {adapter}. Leave --adapter out."
    )
  if base_model and not model_card.is_hub_name(base_model):
    raise ValueError(
      f"base_model {base_model!r}: expected owner/name as on the hub."
    )
  start_name = base_model or hub_name(start)
  terms = licence(start, run / "source")
  if not model_card.is_hub_name(start_name):
    logging.warning(
      "The card names no base_model, because %s does not say its name on the "
      "hub; give it with --base_model=owner/name.",
      start,
    )
  if not terms:
    logging.warning(
      "The card names no license, because %s has neither a card with one nor a "
      "LICENSE file; add the line to the exported README.md.",
      start,
    )
  c = config.curriculum
  is_last_rollout = rollout == c.total_steps // c.steps_per_rollout
  card = model_card.render(
    model_card.Exported(
      config=config,
      provenance=_json(run / "provenance.json"),
      base_model=start_name,
      licence=terms,
      rollout=rollout,
      dtype=dtype,
      evaluated_dtype=config.checkpoint.export_dtype,
      prompt=_json(run / "prompts.json").get("plain", ""),
      rows=_evaluations(run) if is_last_rollout else [],
    )
  )
  _, _, policy = load_policy(run, rollout=rollout, base=base)
  texts = {"README.md": card}
  hf.save(output, policy, dtype=dtype, shard_bytes=shard_bytes, texts=texts)
  if adapter:
    hf.save_adapter(adapter, policy, base=base_model or str(start))
  return rollout


def load_policy(
  run: str | pathlib.Path,
  *,
  rollout: int | None = None,
  base: str | pathlib.Path = "",
) -> tuple[int, config_lib.ExperimentConfig, hf.Policy]:
  """Loads the policy of a checkpoint, sharded over all local devices.

  Args:
    run: its folder.
    rollout: number of the checkpoint; None: the newest undamaged one.
    base: folder of the policy that the run's adapters apply to; "": the one
      that the configuration names. Unused without adapters.

  Returns:
    The number of rollouts trained, the run's configuration, and the policy:
    trained arrays in float32, a frozen base in the type that the run used.

  Raises:
    ValueError: the folder is not a run's, or the base is not the run's.
    FileNotFoundError: the checkpoint does not exist.
    checkpoint.DamagedError: it is damaged, or all are.
  """
  run = pathlib.Path(run)
  rollout, config = _checkpoint(run, rollout)
  a, tokenizer = hf.describe(run / "source")
  a = lora.attach(a, config.lora)
  mesh = sharding.mesh(fsdp=jax.local_device_count())
  rows = table.trainable_rows(a)
  abstract_params = weights.abstract(
    rows, weights.shardings(rows, mesh, sharding.RULES), jnp.float32
  )
  params = checkpoint.read(
    run / "checkpoints", rollout, "params", abstract_params
  )
  if a.lora is not None:
    base = base or config.policy
    if not pathlib.Path(base).is_dir():
      raise ValueError(
        f"{base}: no such folder; {run} trained adapters, whose export needs "
        "the policy that it began with. Name its folder with --base."
      )
    base_digest = _policy_digest(run / "provenance.json")
    if base_digest and base_digest != tensor_files.digest(base):
      raise ValueError(
        f"{base}: its weights are not those that {run} began with (another "
        "SHA-256); name that folder with --base."
      )
    frozen = hf.load(base, mesh=mesh, dtype=lora.base_dtype(config.lora)).params
    params = lora.combine(frozen, params)
  return rollout, config, hf.Policy(params, a, tokenizer, run / "source")


def _checkpoint(
  run: pathlib.Path, rollout: int | None
) -> tuple[int, config_lib.ExperimentConfig]:
  """Returns the number of the checkpoint to read, and its configuration."""
  if not (run / "source").is_dir():
    raise ValueError(
      f"{run}: no source/; expected the folder of a training run."
    )
  rollout = checkpoint.sound(run / "checkpoints", rollout)
  values = checkpoint.read_json(run / "checkpoints", rollout, "config")
  return rollout, config_settings.from_dict(config_lib.ExperimentConfig, values)


def _policy_digest(provenance: pathlib.Path) -> str | None:
  """Returns the SHA-256 of the policy's weights in a provenance file."""
  digest: str | None = _json(provenance).get("policy", {}).get("sha256")
  return digest


def _check_targets(
  run: pathlib.Path,
  start: str | pathlib.Path,
  output: str | pathlib.Path,
  adapter: str | pathlib.Path,
  *,
  overwrite: bool,
) -> None:
  """Refuses folders to write that exist, unless they are earlier exports.

  Args:
    run: the run's folder.
    start: the folder of the policy that the run began with.
    output: folder to write.
    adapter: folder to write the adapters to, "" for none.
    overwrite: whether to replace earlier exports.
  """
  folders = [pathlib.Path(f).resolve() for f in (output, adapter) if str(f)]
  if any(a.is_relative_to(b) for a, b in itertools.permutations(folders, 2)):
    raise ValueError(
      f"{output} and {adapter}: expected two folders, neither inside the other."
    )
  start = pathlib.Path(start).resolve()
  for folder in filter(pathlib.Path.exists, folders):
    if not overwrite:
      raise ValueError(
        f"{folder} exists; name another folder, or overwrite it."
      )
    is_input = folder.parent == run.resolve() or folder == start
    if is_input or not any(folder.glob("*.safetensors")):
      raise ValueError(
        f"{folder} is not an earlier export, so it is not replaced; name "
        "another folder."
      )


def hub_name(folder: str | pathlib.Path) -> str:
  """Returns the name of a policy from the path of its folder.

  The hub's cache stores `owner/name` as `models--owner--name`:
  https://huggingface.co/docs/huggingface_hub/guides/manage-cache
  """
  for part in pathlib.Path(folder).parts:
    kind, *names = part.split("--", 2)
    if kind == "models" and len(names) == 2:
      return "/".join(names)
  return pathlib.Path(folder).name


def licence(*folders: str | pathlib.Path) -> dict[str, str]:
  """Returns the licence of the first folder that has one, otherwise {}.

  The keys are the hub's: `license`, `license_name` and `license_link`. They are
  those of the folder's card; without a card `license` is `other`, and
  `license_link` names the licence file.
  """
  for folder in map(pathlib.Path, folders):
    try:
      card = huggingface_hub.metadata_load(folder / "README.md") or {}
    except (OSError, ValueError, yaml.YAMLError):
      card = {}  # The card is missing or damaged.
    keys = ("license", "license_name", "license_link")
    terms = {k: card[k] for k in keys if isinstance(card.get(k), str)}
    if "license" in terms:
      return terms
    if files := sorted(folder.glob("LICENSE*")):
      return {"license": "other", "license_link": files[0].name}
  return {}


def _evaluations(run: pathlib.Path) -> list[metrics.Row]:
  """Returns the run's evaluations of its last policy, ordered by name.

  They are those whose provenance has the hash of the run's `policy/`.
  """
  episodes = (run / "evaluation").glob(f"*/{loading.EPISODES}")
  folders = sorted(path.parent for path in episodes)
  if not folders or not (run / "policy").is_dir():
    return []
  digest = tensor_files.digest(run / "policy")
  return [
    loading.load_row(folder.name, folder)
    for folder in folders
    if _policy_digest(folder / "provenance.json") == digest
  ]
