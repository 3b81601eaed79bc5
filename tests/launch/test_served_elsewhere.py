"""`launch.serve` in front of a real SGLang server; skipped without one.

The server is SGLang's, as tests/rollout/test_sglang_real.py says, with the
policy of configs/graded_world_policy as its model.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys

import httpx2
import openai
import pytest

_URL = os.environ.get("ANYSEARCH_SGLANG_URL", "")
_POLICY = "configs/graded_world_policy"
if not _URL:
  pytest.skip(
    "no SGLang server; set ANYSEARCH_SGLANG_URL as test_sglang_real.py says",
    allow_module_level=True,
  )


def _model():
  listed = httpx2.get(f"{_URL}/v1/models", trust_env=False).json()
  return listed["data"][0]["id"]


@pytest.fixture(params=["sglang", "openai"])
def served(request):
  """The address of a served policy that the server samples."""
  folder = httpx2.get(f"{_URL}/model_info", trust_env=False).json()
  if not folder["tokenizer_path"].endswith(_POLICY):
    pytest.skip(f"the server has another policy than {_POLICY}")
  flags = {
    "sglang": lambda: [f"--sglang={_URL}"],
    "openai": lambda: [f"--openai={_URL}/v1", f"--openai_model={_model()}"],
  }[request.param]()
  command = [sys.executable, "-m", "launch.serve", f"--hf={_POLICY}", *flags]
  process = subprocess.Popen(
    [*command, "--config=configs/quickstart.py", "--port=0", "--threads=1"],
    stdout=subprocess.PIPE,
    text=True,
  )
  try:
    greeting = process.stdout.readline()
    yield re.search(r" at (http://\S+)$", greeting.strip())[1]
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
  finally:
    process.kill()
    process.wait(60)
    process.stdout.close()


def test_policy_that_a_server_samples_answers_both_apis(served):
  client = openai.OpenAI(base_url=f"{served}/v1", api_key="none", max_retries=0)
  asked = httpx2.get(f"{served}/examples").json()[:4]
  searches = 0
  for question in asked:
    response = client.responses.create(
      model="quickstart", input=question, max_tool_calls=2
    )
    assert response.status == "completed" and response.output_text
    calls = [i for i in response.output if i.type == "web_search_call"]
    assert len(calls) == response.usage.searches <= 2
    searches += len(calls)
  assert searches

  def greedy(seed):
    found = client.chat.completions.create(
      model="quickstart@2",
      messages=[{"role": "user", "content": asked[1]}],
      temperature=0,
      seed=seed,
    )
    return found.choices[0].message

  assert greedy(1) == greedy(2)
  told = list(
    client.responses.create(model="quickstart", input=asked[0], stream=True)
  )
  assert told[-1].type == "response.completed"
