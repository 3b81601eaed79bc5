"""The model card: its text, from the values of a run."""

from __future__ import annotations

import dataclasses

import huggingface_hub
import point_values
import pytest
import study

from anysearch_jax import config as config_lib
from anysearch_jax.config import settings as config_settings
from anysearch_jax.evaluation import columns, measures
from anysearch_jax.export import model_card
from anysearch_jax.methods import systems
from anysearch_jax.report import tables

CONFIG = config_lib.ExperimentConfig()


def render(config=CONFIG, **values) -> str:
  policy = model_card.Exported(
    config=config_settings.to_dict(config),
    provenance={},
    base_model="base",
    licence={},
    rollout=100,
    dtype="bfloat16",
  )
  return model_card.render(dataclasses.replace(policy, **values))


def cell(card: str, name: str) -> str:
  (line,) = [x for x in card.splitlines() if x.startswith(f"| {name} |")]
  return line.removeprefix(f"| {name} | ").removesuffix(" |")


def change(group: str, **values):
  return dataclasses.replace(
    CONFIG, **{group: dataclasses.replace(getattr(CONFIG, group), **values)}
  )


@pytest.mark.parametrize(
  ("name", "text"),
  [
    ("trained", "every weight"),
    ("rollouts", "100 of 100"),
    ("a rollout", "512 questions x 5 samples, 5 optimizer steps"),
    (
      "budgets",
      "5 down to 1 in the first 100 steps, 1 to 5 drawn adaptively (lambda "
      "0.6) in the other 400",
    ),
    ("scaffold", "in Phase I"),
    (
      "reward",
      "alpha 0.5 EM, beta 0.15 format, delta 0.05 length, gamma (tool) "
      "adaptive, at most 0.3",
    ),
    ("objective", "GRPO, clip 0.2 / 0.28, KL 0.001 (k3)"),
    (
      "optimizer",
      "AdamW, learning rate 1e-06, betas 0.9 / 0.98, weight decay 0.01, "
      "gradient norm at most 1.0",
    ),
    ("questions", "not recorded"),
  ],
)
def test_the_papers_run_in_words(name, text):
  assert cell(render(), name) == text


@pytest.mark.parametrize(
  ("group", "values", "name", "text"),
  [
    ("curriculum", {"fixed_budget": 3}, "budgets", "3 throughout"),
    (
      "curriculum",
      {"phase1_steps": 0},
      "budgets",
      "1 to 5 drawn adaptively (lambda 0.6) in all 500",
    ),
    (
      "curriculum",
      {"phase1_steps": 500},
      "budgets",
      "5 down to 1 in all 500 steps",
    ),
    ("curriculum", {"phase1_steps": 0}, "scaffold", "none"),
    (
      "curriculum",
      {"phase2_scaffold": True},
      "scaffold",
      "in Phase I and Phase II",
    ),
    (
      "reward",
      {"gamma_mode": "off", "use_rel": False},
      "reward",
      "alpha 0.5 EM, beta 0.15 format, delta 0.05 length, gamma (tool) off, "
      "without R_rel",
    ),
    (
      "optimizer",
      {"max_grad_norm": 0.0},
      "optimizer",
      "AdamW, learning rate 1e-06, betas 0.9 / 0.98, weight decay 0.01, "
      "gradient norm at most unbounded",
    ),
    (
      "lora",
      {"rank": 8, "targets": ("q", "v")},
      "trained",
      "LoRA, rank 8, alpha 32, on q, v; merged here",
    ),
  ],
)
def test_other_runs_in_words(group, values, name, text):
  assert cell(render(change(group, **values)), name) == text


@pytest.mark.parametrize(
  ("method", "constants", "text"),
  [
    ("search_r1", {}, "EM"),
    (
      "search_r1",
      {"format_variant": True, "retrieval": 0.1},
      "EM, 0.2 less in a malformed response; otherwise 0.2 for a well-formed "
      "response, 0.1 more if a passage shown has an accepted answer, 0.1 for "
      "an answer in a malformed one",
    ),
    ("otc", {"c": 8.0}, "alpha 1 EM x tool productivity (grpo form, c 8)"),
    (
      "ikea",
      {},
      "1 for a right answer plus 0.6, 0.4, 0.2, 0 after 0, 1, 2, ... searches; "
      "0.05 for a wrong one after a search; -1 for a malformed response",
    ),
    ("zerosearch", {}, "F1"),
    (
      "stepsearch",
      {},
      "F1 + 0.618 search keys, -1 without an answer; for each search 0.6 (gain "
      "- redundancy)",
    ),
  ],
)
def test_card_of_a_compared_system_describes_its_own_reward(
  method, constants, text
):
  own = getattr(CONFIG.method, method)
  config = change(
    "method", name=method, **{method: dataclasses.replace(own, **constants)}
  )
  card = render(config)
  assert cell(card, "reward") == text
  label = systems.get(method).label
  assert f"with the reward of {label}, which" in " ".join(card.split())


def test_card_of_every_trained_system_describes_its_reward():
  for name, system in systems.METHODS.items():
    if system.reward is not None:
      card = render(change("method", name=name))
      assert cell(card, "reward") != f"the reward of {name}"


def test_card_of_a_reward_function_shows_what_was_recorded_of_it():
  card = render(
    change("reward", function="mine:reward"),
    provenance={"reward": {"function": "mine:reward", "sha256": "ab"}},
  )
  assert cell(card, "reward") == "function mine:reward, sha256 ab"
  assert "with a reward function of its own" in " ".join(card.split())


def test_card_of_a_run_with_a_critic_names_ppo():
  card = render(change("objective", advantage="gae"))
  assert cell(card, "objective").startswith("PPO, clip")
  assert "- ppo\n" in card and "Trained by PPO" in " ".join(card.split())


def test_card_of_a_fixed_budget_names_no_curriculum():
  card = render(change("curriculum", fixed_budget=3))
  assert "curriculum" not in card
  assert "Trained by GRPO with a fixed budget" in " ".join(card.split())


@pytest.mark.parametrize(
  ("base", "line"),
  [
    ("Qwen/Qwen2.5-7B", "base_model: Qwen/Qwen2.5-7B"),
    ("local-folder", None),
    ("/models/local", None),
    ("./models", None),
    ("a/b/c", None),
    ("a/b\nc: d", None),
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
  assert data == {
    "library_name": "transformers",
    "pipeline_tag": "text-generation",
    "base_model": "Qwen/Qwen2.5-7B",
    **licence,
  }


def test_evaluation_has_a_line_per_budget_with_intervals():
  row = study.row("plain", questions=40, budgets=(0, 2), seeds=(1, 2))
  card = render(rows=[row], evaluated_dtype="float32")
  cells = point_values.by_budget(row.episodes)
  for budget, c in cells.items():
    part = columns.by_budget(row.columns)[budget]
    low, high = measures.estimates(part)["accuracy"][1:]
    _, least, most = point_values.wilson(round(c.accuracy * c.n), c.n)
    # Two seeds of a question are not independent, so the interval is wider.
    assert high - low > most - least
    (line,) = [x for x in card.splitlines() if x.startswith(f"| {budget} |")]
    n, accuracy, searches, tp, failed = line.strip("| ").split(" | ")[1:]
    assert n == str(c.n)
    assert accuracy == (
      f"{100 * c.accuracy:.1f} [{100 * low:.1f}, {100 * high:.1f}]"
    )
    assert searches == f"{c.searches:.2f}"
    assert (tp == "-") == (budget == 0)
    assert failed == str(c.failed)
  assert "**plain**: no scaffold, 2 seeds;" in card
  assert "Measured with the weights in float32." in card
  assert "was not evaluated" not in card


def test_a_cell_never_breaks_its_table():
  card = render(base_model="a|b\nc")
  assert cell(card, "base model") == "a\\|b c"


def test_untrusted_text_is_escaped_in_the_card():
  row = study.row("<b>", questions=1, budgets=(1,))
  config = dataclasses.replace(CONFIG, name="<i>")
  card = render(config, base_model="<img src=x>", rows=[row])
  assert "<" not in card
  for text in ("&lt;b&gt;", "&lt;i&gt;", "&lt;img src=x&gt;"):
    assert text in card


def test_prompt_is_shown_verbatim():
  prompt = "Use ```python```.\n| a | <b>"
  assert f"````\n{prompt}\n````" in render(prompt=prompt)


def test_the_card_lists_what_changed_while_the_run_trained():
  settings = {"optimizer.learning_rate": [1e-6, 1e-5], "mesh.data": [1, 2]}
  card = render(provenance={"changes": [{"rollout": 20, "settings": settings}]})
  assert cell(card, "changed from rollout 20 on") == tables.escaped(
    "optimizer.learning_rate 1e-06 -> 1e-05, mesh.data 1 -> 2"
  )
  assert "changed from" not in render()
