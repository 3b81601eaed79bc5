"""The commands of evaluation: their flags, their policies, their folders."""

from __future__ import annotations

import dataclasses
import json

import commands
import fake_sglang
import fake_vllm
import played_evaluation
import pytest
import scripted
import sglang_engines
import small_run
from absl import app

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.evaluation import harness
from anysearch_jax.launch import evaluate, parts, policies
from anysearch_jax.policy import hf, sharding
from anysearch_jax.training import checkpoint, placement, validation


@pytest.mark.parametrize(
  ("text", "budgets"),
  [("0..8", tuple(range(9))), ("3", (3,)), ("0..2, 8", (0, 1, 2, 8))],
)
def test_budgets_are_ranges_and_numbers(text, budgets):
  assert evaluate.parse_budgets(text) == budgets


def test_pairs_are_all_combinations_of_their_caps():
  assert evaluate.parse_pairs("searches=1|3,tokens=64|128;tokens=9") == (
    *("searches=1,tokens=64", "searches=1,tokens=128", "searches=3,tokens=64"),
    *("searches=3,tokens=128", "tokens=9"),
  )


@pytest.mark.parametrize("text", ["", "a", "0..", "-1", "3..1"])
def test_invalid_budgets_are_refused(text):
  with pytest.raises(app.UsageError) as error:
    evaluate.parse_budgets(text)
  assert str(error.value).startswith(f"--budgets={text}: ")


@pytest.mark.parametrize(
  "text", ["searches=1|1", "pages=3", "tokens=", "searches=1;searches=1"]
)
def test_invalid_pairs_are_refused(text):
  evaluation = {"pairs": evaluate.parse_pairs(text)}
  config = config_lib.changed(small_run.CONFIG, evaluation=evaluation)
  with pytest.raises(ValueError, match="evaluation.pairs: "):
    validation.check_settings(config)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  """Makes a training run of a random policy with two rollouts."""
  root = tmp_path_factory.mktemp("runs")
  made = small_run.parts()
  hf.save(root / "base", made["policy"])
  made["policy"] = hf.load(root / "base")
  config = config_lib.changed(
    small_run.CONFIG,
    policy=str(root / "base"),
    curriculum={"total_steps": 2, "phase1_steps": 0},
  )
  small_run.train(root / "run", made, config)
  return root / "run"


def rows(chosen, config, folder, questions=None):
  """Plays a policy and returns its episodes."""
  source = parts.source(config)
  folder.mkdir()
  with policies.player(chosen, config, source) as player:
    harness.evaluate(
      config.evaluation,
      played_evaluation.playing(config),
      player=player,
      questions=questions or source.evaluation_questions(per_dataset=3),
      retriever=source.retriever,
      folder=folder,
    )
  return (folder / harness.EPISODES).read_text().splitlines()


def test_a_checkpoint_plays_as_its_export_does(run, tmp_path):
  asked = {"budgets": (0, 1), "seeds": (1,)}
  config = config_lib.changed(small_run.CONFIG, evaluation=asked)
  chosen = policies.PolicyChoice("checkpoint", str(run))
  found = rows(chosen, config, tmp_path / "checkpoint")
  exported = policies.PolicyChoice("hf", str(run / "policy"))
  assert found == rows(exported, config, tmp_path / "export")
  began = policies.PolicyChoice("hf", str(run.parent / "base"))
  assert found != rows(began, config, tmp_path / "base")
  identity = policies.identity(chosen)
  newest = checkpoint.sound(run / "checkpoints")
  assert identity["rollout"] == newest
  assert identity["sha256"] != policies.identity(exported)["sha256"]
  assert identity["checkpoint"] == str(run)


@pytest.mark.parametrize(
  ("name", "message"),
  [("@x", "expected the number of rollouts"), ("@7", "expected 7")],
)
def test_a_checkpoint_that_is_not_there_is_refused(run, name, message):
  with pytest.raises(ValueError, match=message):
    policies.identity(policies.PolicyChoice("checkpoint", f"{run}{name}"))


@pytest.mark.parametrize(
  ("kind", "fake"), [("sglang", fake_sglang), ("vllm", fake_vllm)]
)
def test_servers_sample_the_policy_of_a_folder(tmp_path, kind, fake):
  hf.save(tmp_path / "policy", sglang_engines.policy())
  said = fake_sglang.ids("<", "answer", ">", "b", "</answer>")
  with fake.Server(said) as server:
    config = config_lib.changed(
      small_run.CONFIG,
      engine={"kind": kind},
      servers={"urls": (server.url,), "retries": 1},
      evaluation={"budgets": (0, 2), "seeds": (1,)},
      episode={"max_generated": 16, "max_context": 60},
    )
    chosen = policies.PolicyChoice("hf", str(tmp_path / "policy"))
    asked = [types.Question(q, "a", (a,)) for q, a in ("qb", "pc")]
    found = rows(chosen, config, tmp_path / "evaluation", asked)
    assert len(server.bodies(*server.SAMPLING)) == 4
  verdicts = [(row["answer"], row["em"]) for row in map(json.loads, found)]
  assert verdicts == [("b", 1), ("b", 0)] * 2


@pytest.mark.parametrize("by_flag", [True, False])
def test_evaluation_by_servers_needs_one_device(by_flag):
  """Of any configuration: here one for more devices than the tests have."""
  urls = ("http://127.0.0.1:1",)
  config = dataclasses.replace(
    small_run.CONFIG,
    mesh=config_lib.MeshConfig(fsdp=8, tensor=4, rollout=(40, 41)),
    engine=config_lib.EngineConfig(kind="jax" if by_flag else "sglang"),
  )
  a = sglang_engines.policy().architecture
  with pytest.raises(ValueError, match="device 41"):
    placement.check_playing(a, config)
  found = policies.with_servers(config, urls if by_flag else (), kind="sglang")
  placement.check_playing(a, found)
  assert sharding.rollout_mesh(found.mesh, a).size == 1
  assert found.engine.kind == "sglang"
  assert not by_flag or found.servers.urls == urls
  # In this process it is sampled on the mesh of the configuration.
  in_process = dataclasses.replace(config, engine=config_lib.EngineConfig())
  assert policies.with_servers(in_process, (), kind="sglang") == in_process


def make(config, source):
  """Makes a scripted policy, for --scripted."""
  del config, source
  return scripted.Engine([scripted.answer("x")]), scripted.CODEC


def test_a_function_makes_a_policy(tmp_path):
  evaluation = config_lib.EvaluationConfig(budgets=(1,), seeds=(1,))
  config = config_lib.ExperimentConfig(evaluation=evaluation)
  chosen = policies.PolicyChoice("scripted", f"{__name__}:make")
  found = rows(chosen, config, tmp_path / "e")
  assert {json.loads(row)["answer"] for row in found} == {"x"}
  with pytest.raises(ValueError, match="which names .* or one of optimum, "):
    rows(policies.PolicyChoice("scripted", "nothing"), config, tmp_path / "f")


def test_commands_play_resume_and_refuse(tmp_path):
  out = tmp_path / "e"
  flags = [
    *("--config=configs/quickstart.py", "--config.evaluation.questions=6"),
    *("--scripted=unknown_only", "--budgets=0..2", "--cache="),
    f"--output={out}",
  ]
  assert commands.run(evaluate, *flags, "--seeds=2") == ""
  found = [json.loads(line) for line in (out / "episodes.jsonl").open("rb")]
  played = [(row["seed"], row["budget"]) for row in found]
  cells = [(seed, budget) for seed in (42, 43) for budget in (0, 1, 2)]
  assert played == [cell for cell in cells for _ in range(6)]
  assert sorted(path.name for path in out.iterdir()) == [
    *("config.json", "episodes.jsonl", "provenance.json", "summary.json"),
  ]
  summary = json.loads((out / "summary.json").read_text())
  searches = sum(row["searches"] for row in found)
  counted = summary["last_start"]
  assert counted["search"]["searches"] == searches > 0
  assert counted["shares"]["searches"] == pytest.approx(
    1 - counted["search"]["batched_queries"] / searches
  )
  # A kill before the last file leaves nothing to play.
  (out / "summary.json").unlink()
  assert commands.run(evaluate, *flags, "--seeds=2") == ""
  again = json.loads((out / "summary.json").read_text())
  assert (again["last_start"]["played"], again["episodes"]) == (0, 36)
  assert again["cells"] == summary["cells"]
  # Episodes that failed are played again, also when all have been played.
  kept = (out / "episodes.jsonl").read_bytes()
  found[3] |= {"failed": True}
  (out / "episodes.jsonl").write_text(
    "".join(f"{json.dumps(row)}\n" for row in found)
  )
  again["cells"][0]["failed"] = 1
  (out / "summary.json").write_text(json.dumps(again))
  assert commands.run(evaluate, *flags, "--seeds=2") == ""
  assert (out / "episodes.jsonl").read_bytes() == kept
  again = json.loads((out / "summary.json").read_text())
  assert (again["last_start"]["played"], again["cells"]) == (
    1,
    summary["cells"],
  )
  # A setting that the version of the folder lacked has its default.
  config = json.loads((out / "config.json").read_text())
  del config["watch"]["max_gap"]
  (out / "config.json").write_text(json.dumps(config))
  assert commands.run(evaluate, *flags, "--seeds=2") == ""
  for flag, said in (
    # Another configuration is another evaluation.
    (
      "--config.watch.max_gap=0.5",
      "watch.max_gap 0.1 -> 0.5, evaluation.seeds",
    ),
    ("--seeds=3", "found evaluation.seeds [42, 43] -> [42, 43, 44]; it holds"),
    ("--hf=configs/graded_world_policy", "Found 2 policies, expected one of"),
  ):
    assert said in commands.run(evaluate, *flags, flag)
  own = tmp_path / "own.py"
  own.write_text(
    "import anysearch_jax as aj\n"
    "class Down:\n  async def search(self, request):\n"
    "    raise aj.RetrievalError('down')\n"
    "def down(config): return Down()\n"
  )
  kind = f"--config.retrieval.kind={own}:down"
  for _ in range(2):
    assert (
      commands.run(evaluate, *flags, kind, f"--output={tmp_path / 'f'}")
      == "10 episodes failed; the same command plays them again."
    )
