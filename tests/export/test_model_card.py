"""The model card: its text, from the values of a run."""

from __future__ import annotations

import dataclasses

import huggingface_hub
import pytest
import study

from anysearch_jax import config as config_lib
from anysearch_jax.config import settings as config_settings
from anysearch_jax.export import model_card
from anysearch_jax.methods import systems
from anysearch_jax.report import tables

CONFIG = config_lib.ExperimentConfig()
LORA = {"rank": 8, "targets": ("q", "v")}


def render(config=CONFIG, **values) -> str:
  said = {"provenance": {}, "base_model": "base", "licence": {}} | values
  said = {"rollout": 100, "dtype": "bfloat16"} | said
  return model_card.render(model_card.Exported(config=config, **said))


def cell(card: str, name: str) -> str:
  (line,) = [x for x in card.splitlines() if x.startswith(f"| {name} |")]
  return line.removeprefix(f"| {name} | ").removesuffix(" |")


def change(group: str, **values):
  return config_lib.changed(CONFIG, **{group: values})


@pytest.mark.parametrize(
  ("group", "values", "name", "text"),
  [
    ("reward", {}, "trained", "every weight"),
    ("reward", {}, "rollouts", "100 of 100"),
    ("reward", {}, "a rollout", "512 questions x 5 samples, 5 optimizer steps"),
    ("reward", {}, "budgets", "1 to 5"),
    ("reward", {}, "questions", "not recorded"),
    ("reward", {}, "reward.gamma_mode", "adaptive | "),
    ("reward", {"use_rel": False}, "reward.use_rel", "False | "),
    ("reward", {}, "objective.clip_high", "0.28 | "),
    ("reward", {}, "optimizer.learning_rate", "1e-06 | "),
    ("curriculum", {"fixed_budget": 3}, "budgets", "3 throughout"),
    ("curriculum", {"phase1_steps": 0}, "curriculum.phase1_steps", "0 | "),
    ("lora", LORA, "trained", "LoRA, rank 8, alpha 32, on q, v; merged here"),
  ],
)
def test_a_run_in_words(group, values, name, text):
  shown = cell(render(change(group, **values)), name)
  assert shown.startswith(text) and (shown == text or text.endswith("| "))


@pytest.mark.parametrize(
  "method", [n for n, s in systems.METHODS.items() if s.reward is not None]
)
def test_card_of_every_trained_system_shows_its_own_constants(method):
  card = render(change("method", name=method))
  own = systems.get(method).constants_of(CONFIG)
  for field in dataclasses.fields(own) if own is not CONFIG else ():
    value = getattr(own, field.name)
    if isinstance(value, bool | str) or not isinstance(value, float):
      continue
    if field.metadata["setting"].kind is config_settings.Kind.LEARNING:
      assert cell(card, f"reward.{field.name}").startswith(f"{value:g} | ")
  label = systems.get(method).label
  if method != "anysearch":
    assert f"with the reward of {label}, which" in " ".join(card.split())


def test_card_of_a_reward_function_shows_what_was_recorded_of_it():
  card = render(
    change("reward", function="mine:reward"),
    provenance={"own": {"reward.function": {"name": "mine", "sha256": "ab"}}},
  )
  assert cell(card, "reward.function") == "name mine, sha256 ab"
  assert "with a reward function of its own" in " ".join(card.split())


def test_the_introduction_names_the_algorithm_and_the_budget():
  card = " ".join(render(change("objective", advantage="gae")).split())
  assert "- ppo " in card
  assert "Trained by PPO under a budget curriculum, the method of" in card
  card = " ".join(render(change("curriculum", fixed_budget=3)).split())
  assert "Trained by GRPO with a fixed budget, with the reward of" in card


@pytest.mark.parametrize(
  ("base", "line"),
  [
    ("Qwen/Qwen2.5-7B", "base_model: Qwen/Qwen2.5-7B"),
    *(("local-folder", None), ("/models/local", None), ("./models", None)),
    *(("a/b/c", None), ("a/b\nc: d", None)),
  ],
)
def test_base_model_is_written_for_hub_names_only(base, line):
  card = render(base_model=base)
  head, _, _ = card.removeprefix("---\n").partition("\n---\n")
  assert card.startswith("---\n")
  assert ("base_model" in head) == (line is not None)
  assert line is None or line in head.splitlines()
  assert cell(card, "base model") == " ".join(base.split())


@pytest.mark.parametrize(
  "licence",
  [
    {},
    {"license": "apache-2.0"},
    {"license": "other", "license_link": "LICENSE"},
    {"license": "other", "license_name": "a: [b", "license_link": "a\n---\nb"},
  ],
)
def test_the_header_is_read_by_the_hubs_own_tools(licence, tmp_path):
  (tmp_path / "README.md").write_text(
    render(base_model="Qwen/Qwen2.5-7B", licence=licence)
  )
  data = huggingface_hub.ModelCard.load(tmp_path / "README.md").data.to_dict()
  assert data.pop("tags")[0] == "anysearch"
  kind = {"library_name": "transformers", "pipeline_tag": "text-generation"}
  assert data == kind | {"base_model": "Qwen/Qwen2.5-7B"} | licence


def test_evaluation_has_a_line_per_budget_with_intervals():
  row = study.row("plain", questions=40, budgets=(0, 2), seeds=(1, 2))
  card = render(rows=[row], evaluated_dtype="float32")
  for budget, part in row.by_budget.items():
    value, low, high = (100 * x for x in part.accuracy)
    (line,) = [x for x in card.splitlines() if x.startswith(f"| {budget} |")]
    n, accuracy, searches, tp, failed = line.strip("| ").split(" | ")[1:]
    assert (n, failed) == (str(part.n), str(part.failed))
    assert accuracy == f"{value:.1f} [{low:.1f}, {high:.1f}]"
    assert searches == f"{part.searches.value:.2f}"
    assert (tp == "-") == (budget == 0)
  assert "**plain**: no scaffold, 2 seeds;" in card
  assert "Measured with the weights in float32." in card
  assert "was not evaluated" not in card


def test_untrusted_text_is_escaped_in_the_card():
  row = study.row("<b>", questions=1, budgets=(1,))
  assert cell(render(base_model="a|b\nc"), "base model") == "a\\|b c"
  config = dataclasses.replace(CONFIG, name="<i>")
  card = render(config, base_model="<img src=x>", rows=[row])
  assert "<" not in card
  for text in ("&lt;b&gt;", "&lt;i&gt;", "&lt;img src=x&gt;"):
    assert text in card


def test_prompt_is_shown_verbatim():
  prompt = "Use ```python```.\n| a | <b>"
  assert f"````\n{prompt}\n````" in render(prompt=prompt)
  prompt = "Begin.\n````\n# A heading of its own"
  assert f"`````\n{prompt}\n`````" in render(prompt=prompt)


def test_the_card_lists_what_changed_while_the_run_trained():
  settings = {"optimizer.learning_rate": [1e-6, 1e-5], "mesh.data": [1, 2]}
  card = render(provenance={"changes": [{"rollout": 20, "settings": settings}]})
  assert cell(card, "changed from rollout 20 on") == tables.escaped(
    "optimizer.learning_rate 1e-06 -> 1e-05, mesh.data 1 -> 2"
  )
  assert "changed from" not in render()
