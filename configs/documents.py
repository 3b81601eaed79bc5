"""Questions about documents of your own, to a model that nobody trained for it.

    anysearch ask --documents=my_notes --openai=URL --openai_model=NAME \
        --budget=2 "When does the lease end?"

`--documents` uses this configuration unless `--config` names another, with the
preset that fits the policy.

Presets, `--config=configs/documents.py:<preset>`:
    (none)     a model behind an address, which computes elsewhere
    cpu, gpu   a Hugging Face folder, on this machine's CPU or accelerator
Hardware: `gpu` needs 24 GB for a policy of 4 billion parameters, `cpu` 8 GB of
memory for one of 0.6 billion.
Expected: docs/documents.md.
"""

from __future__ import annotations

from anysearch_jax import config as config_lib

PRESETS = ("", "cpu", "gpu")


def get_config(preset: str = "") -> config_lib.ExperimentConfig:
  if preset not in PRESETS:
    raise ValueError(
      f"configs/documents.py: found preset {preset!r}, expected cpu, gpu or "
      "none."
    )
  # A CPU samples a token of a long context in a tenth of a second or more.
  on_cpu = preset == "cpu"
  context = 8192 if on_cpu else 16384
  return config_lib.ExperimentConfig(
    name="documents",
    compute_dtype="float32" if on_cpu else "bfloat16",
    # Their passages are of the index that --documents builds.
    data=config_lib.DataConfig(source="prepared"),
    retrieval=config_lib.RetrievalConfig(kind="index"),
    episode=config_lib.EpisodeConfig(
      prompts="documents",
      top_k=4,
      max_generated=1024 if on_cpu else 4096,
      max_context=context,
      # Lists that reason at length need it before a short answer.
      answer_room=256 if on_cpu else 512,
      turn_deadline=600.0 if on_cpu else 120.0,
    ),
    # Models of reasoning repeat themselves when they are greedy.
    sampling=config_lib.SamplingConfig(temperature=0.6, top_p=0.95),
    engine=config_lib.EngineConfig(
      slots=4 if on_cpu else 16,
      max_context=context,
      # Two episodes of the longest on a CPU, four elsewhere.
      kv_tokens=(2 if on_cpu else 4) * context,
      page=64,
      lanes=(1, 4) if on_cpu else (4, 16),
      prefill_lanes=1 if on_cpu else 4,
      prefill_chunk=256,
    ),
    # An untrained model plans better if it reads what is left.
    evaluation=config_lib.EvaluationConfig(budgets=(0, 1, 2, 3), scaffold=True),
  )
