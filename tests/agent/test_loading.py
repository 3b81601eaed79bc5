"""Loading an agent: the policy's configuration, and what it searches."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket

import pytest
import retrieval_cases as cases
import scripted
import served
import small_run

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.agent import agent as agent_lib
from anysearch_jax.agent import loading
from anysearch_jax.config import settings as config_settings
from anysearch_jax.policy import hf
from anysearch_jax.retrieval.index import building, opening
from anysearch_jax.retrieval.service import service
from anysearch_jax.rollout import endpoints, searching

CONFIG = small_run.CONFIG


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
  """A random policy in the folder of a run: `run/policy`."""
  folder = tmp_path_factory.mktemp("run")
  hf.save(folder / "policy", small_run.parts()["policy"])
  values = config_settings.to_dict(CONFIG)
  (folder / "config.json").write_text(json.dumps(values))
  return folder / "policy"


def test_policy_in_a_run_has_the_runs_configuration(policy):
  """Which names the world's prompts, and the sizes of the engine."""
  with agent_lib.Agent.load(policy, retriever=scripted.Retriever()) as agent:
    assert agent.slots == CONFIG.engine.slots
    reply = agent.ask("anything ?", budget=1)
  prompt = reply.trajectory.token_ids[
    reply.trajectory.authors == types.Author.PROMPT
  ]
  _, codec = hf.describe(policy)
  assert codec.decode(prompt.tolist()).startswith("budget 1 question")
  assert len(reply.trajectory.token_ids) <= CONFIG.episode.max_context


def test_policy_elsewhere_has_the_papers_prompt(policy, tmp_path):
  alone = tmp_path / "alone"
  hf.save(alone, hf.load(policy))
  config = loading.default_config(max_context=4096)
  assert config.episode.prompts == "paper"
  assert config.episode.max_context == config.engine.max_context == 4096
  assert loading.default_config(2**20).engine.max_context == 8192
  with agent_lib.Agent.load(alone, retriever=scripted.Retriever()) as agent:
    assert agent.slots == config.engine.slots


@pytest.mark.parametrize(
  ("template", "reason"),
  [
    ("{{ 'anything' }}", "leaves the question out of the prompt"),
    ("{% if %}", "the chat template cannot be rendered in line 1"),
  ],
)
@pytest.mark.parametrize("is_served", [False, True])
def test_a_template_that_loses_the_question_is_refused_before_weights_are_read(
  policy, tmp_path, template, reason, is_served
):
  shutil.copytree(policy, tmp_path, dirs_exist_ok=True)
  (tmp_path / "chat_template.jinja").write_text(template)
  (weights,) = tmp_path.glob("*.safetensors")
  weights.write_bytes(b"not read")
  served_elsewhere = endpoints.Endpoint(
    "http://127.0.0.1:9/v1", model="m", tokenizer=str(tmp_path)
  )
  with pytest.raises(ValueError, match=reason):
    agent_lib.Agent.load(
      served_elsewhere if is_served else tmp_path,
      retriever=scripted.Retriever(),
      config=CONFIG,
    )


@pytest.fixture(scope="module")
def index(tmp_path_factory):
  """The folder of an index by BM25 over twenty passages."""
  folder = tmp_path_factory.mktemp("index")
  source = cases.write(folder / "c.jsonl", 20)
  building.build(
    source, folder / "index", building.Settings("bm25"), encoder=None
  )
  return folder / "index"


def found(retriever):
  """Searches as an agent would; returns the ids of the passages."""
  searcher = searching.BatchingRetriever(
    loading._open_retriever(retriever), CONFIG.search
  )
  answer = asyncio.run(searcher.search(types.SearchRequest("fire n7", 2)))
  return [passage.id for passage in answer]


def test_folder_of_an_index_is_searched(index):
  expected = opening.open_index(index).search(["fire n7"], 2)
  assert found(index) == [passage.id for passage in expected[0]]
  assert found(str(index)) == found(index)


def test_address_of_a_server_is_searched(index):
  app = service.create_app(opening.open_index(index))
  with served.listening(app) as (host, port):
    url = f"http://{host}:{port}"
    assert found(url) == found(index)


@pytest.mark.parametrize(
  "wrong, said", [("nowhere", "nowhere"), ("http://", "http://")]
)
def test_what_cannot_be_searched_is_refused(policy, wrong, said):
  with pytest.raises(ValueError, match=said):
    agent_lib.Agent.load(policy, retriever=wrong)


CODE = """import pathlib
import anysearch_jax as aj

pathlib.Path({marker!r}).touch()
ENVIRONMENT = aj.Environment(
  scaffold="budget {{B}} question {{Question}}",
  plain="question {{Question}}",
  over_budget="no budget ; answer now\\n",
  no_action="search or answer\\n",
  format=None,
)
METHOD = aj.Method("theirs", "Theirs", environments={{"e": ENVIRONMENT}})
"""


@pytest.fixture
def strangers_run(policy, tmp_path, monkeypatch):
  """A run whose configuration names code, and the file that the code writes."""
  marker = tmp_path / "marker"
  run = tmp_path / "run"
  run.mkdir()
  shutil.copytree(policy, run / "policy")
  (run / "their_code.py").write_text(CODE.format(marker=str(marker)))
  monkeypatch.chdir(run)
  monkeypatch.syspath_prepend(str(run))
  return run, marker


NAMES = ["their_code.py:METHOD", "{run}/their_code.py:METHOD"]


@pytest.mark.parametrize("name", [*NAMES, "their_code:METHOD"])
def test_code_that_a_stored_configuration_names_is_not_run(strangers_run, name):
  run, marker = strangers_run
  name = name.format(run=run)
  prompts = f"{name}#e"
  config = config_lib.changed(CONFIG, episode={"prompts": prompts})
  values = config_settings.to_dict(config)
  (run / "config.json").write_text(json.dumps(values))
  folder = run / "policy"
  retriever = scripted.Retriever()
  for plugins in ((), (prompts,), ("their_code.py:OTHER",)):
    with pytest.raises(ValueError) as refusal:
      agent_lib.Agent.load(folder, retriever=retriever, plugins=plugins)
    assert f"plugins=[{name!r}] of Agent.load" in str(refusal.value)
    assert not marker.exists()
  with agent_lib.Agent.load(
    folder, retriever=retriever, plugins=[name]
  ) as agent:
    assert agent.slots == CONFIG.engine.slots
  assert marker.exists()


def test_settings_that_an_agent_does_not_use_run_nothing(strangers_run):
  """A reward of one's own needs no name when its policy is asked."""
  run, marker = strangers_run
  name = "their_code.py:METHOD"
  config = config_lib.changed(
    CONFIG,
    reward={"function": name},
    method={"name": name, "judge": name},
    retrieval={"kind": name},
    search={"tools": (f"count={name}",)},
    data={"source": name},
  )
  values = config_settings.to_dict(config)
  (run / "config.json").write_text(json.dumps(values))
  folder = run / "policy"
  with agent_lib.Agent.load(folder, retriever=scripted.Retriever()) as agent:
    assert agent.ask("anything ?", budget=0)
  assert not marker.exists()


def test_servers_that_a_stored_configuration_names_are_not_asked(
  strangers_run, monkeypatch
):
  """They would be sent the key of the variable that it names as well."""
  run, _ = strangers_run
  monkeypatch.setenv("MY_SECRET", "sk-0123456789abcdef")
  with socket.create_server(("127.0.0.1", 0)) as server:
    url = f"http://127.0.0.1:{server.getsockname()[1]}"
    config = config_lib.changed(
      CONFIG,
      engine={"kind": "sglang"},
      servers={"urls": (url,), "api_key_variable": "MY_SECRET"},
    )
    values = config_settings.to_dict(config)
    (run / "config.json").write_text(json.dumps(values))
    folder = run / "policy"
    with agent_lib.Agent.load(folder, retriever=scripted.Retriever()) as agent:
      assert agent.ask("anything ?", budget=0)
    server.settimeout(0.1)
    with pytest.raises(TimeoutError):
      server.accept()
