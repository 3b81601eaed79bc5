"""Loading an agent: the policy's configuration, and what it searches."""

from __future__ import annotations

import asyncio
import json
import shutil

import pytest
import retrieval_cases as cases
import scripted
import served
import small_run

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
