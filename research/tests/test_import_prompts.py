"""`research.import_prompts`, on stand-ins of repositories and on checkouts.

A stand-in has the files, functions and variables of the original and other
words, so its hashes differ from the known ones. The four have texts of every
form; what originals.toml says of all systems is compared with their checkouts
in `ANYSEARCH_ORIGINALS`, if there are any.
"""

from __future__ import annotations

import dataclasses
import hashlib
import tomllib

import hypothesis
import pytest
from hypothesis import strategies as st
from test_originals import checkout as original_checkout

import anysearch_jax as aj
from research import import_prompts

STAND_INS = {
  "anysearch": {
    "examples/anysearch/prompts.py": """
PHASE_ONE_PROMPT = '''You have {B}: {Question}'''
PHASE_TWO_PROMPT = "Find it: {Question}"
""",
    "examples/anysearch/slime_ext/rollout.py": """
async def generate(args):
    if budget_exceeded:
        error_message = ("No " "more.")
    else:
        error_message = "{Neither}."
""",
  },
  "search_r1": {
    "scripts/data_process/qa_search_train_merge.py": '''
raise SystemExit("It must not be executed.")
def make_prefix(dp, template_type):
    question = dp['question']
    if template_type == 'base':
        """A remark."""
        prefix = f"""Find it \\
with <answer> {{x}} </answer>. Question: {question}\\n"""
    return prefix
''',
    "search_r1/llm_agent/generation.py": """
class Manager:
    def execute_predictions(self, predictions, is_last=False):
        '''Not this one.'''
        for action in predictions:
            if action == 'search':
                next_obs.append(f'\\n<information>{results.pop(0).strip()}')
                dones.append(0)
            else:
                next_obs.append(f'\\nNo {{action}}. \\
Once more.\\n')
                dones.append(0)
        return next_obs, dones
""",
  },
  "search_o1": {
    "scripts/prompts.py": """
def get_multiqa_search_o1_instruction(MAX_SEARCH_LIMIT):
    return (
        "Search with <|begin_search_query|> "
        f"at most {MAX_SEARCH_LIMIT} times.\\n"
    )
def get_webpage_to_reasonchain_instruction(
    prev_reasoning, search_query, document
):
    return f'''{prev_reasoning} | {search_query} | {document} | "{search_query}"
'''
def get_task_instruction_openqa(question, model_name=None):
    if model_name == 'qwq':
        user_prompt = (f'Not this one: {question}')
    else:
        user_prompt = ('In \\\\boxed{IT}: ' f'{question}')
    return user_prompt
""",
    "scripts/run_search_o1.py": """
def main():
    def inner(limit):
        pass
    if over:
        limit_message = f"{BEGIN_SEARCH_RESULT}\\nOver.\\n{END_SEARCH_RESULT}"
        seq['history'].append(limit_message)
    elif known:
        limit_message = f"{BEGIN_SEARCH_RESULT}\\nKnown.\\n{END_SEARCH_RESULT}"
""",
    "scripts/evaluate.py": """
def extract_answer(output, mode='gen'):
    extracted_text = ''
    if mode == 'infogen':
        if mark in output:
            extracted_text = output.split(mark)[-1].strip()
        else:
            extracted_text = "Nothing there."
    else:
        extracted_text = matches[-1]
""",
  },
  "r1_searcher": {
    "OpenRLHF-RAG/openrlhf/datasets/prompts_dataset.py": """
def preprocess_data(data, apply_chat_template=None):
    if apply_chat_template:
        question = data["question"]
        messages_chat=[
            {"role": "system","content": '''Think, \
then <answer>.'''},
            {"role": "user", "content":question}
        ]
    else:
        base_prompt = "Think {{twice}}: \\
{question}"
""",
  },
}
EXPECTED = {
  "anysearch": {
    "scaffold": "You have {B}: {Question}",
    "plain": "Find it: {Question}",
    "over_budget": "No more.",
    "no_action": "{{Neither}}.",
  },
  "search_r1": {
    "prompt": "Find it with <answer> {{x}} </answer>. Question: {Question}\n",
    "no_action": "\nNo {{action}}. Once more.\n",
  },
  "search_o1": {
    "prompt": "Search with <|begin_search_query|> at most {B} times.\n"
    "In \\boxed{{IT}}: {Question}",
    "over_budget": "Over.",
    "repeated": "Known.",
    "nothing_found": "Nothing there.",
    "reader": '{reasoning} | {query} | {documents} | "{query}"\n',
  },
  "r1_searcher": {
    "prompt": "{Question}",
    "system": "Think, then <answer>.",
    "prefill": "<think>",
  },
}
BASE = "Think {{twice}}: {Question}"


@pytest.fixture
def checkout(tmp_path):
  def made(system):
    for name, source in STAND_INS[system].items():
      (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
      (tmp_path / name).write_text(source)
    return tmp_path

  return made


def known(system, folder):
  """Returns a system's original with the hashes of its stand-in."""
  original = import_prompts.ORIGINALS[system]
  texts = {
    name: tuple(_known(place, folder) for place in places)
    for name, places in original.texts.items()
  }
  return dataclasses.replace(original, texts=texts)


def _known(place, folder):
  if isinstance(place, str):
    return place
  text = import_prompts._text(place, folder / place.file)
  digest = hashlib.sha256(text.encode()).hexdigest()
  return dataclasses.replace(place, sha256=digest)


def test_the_prompt_of_base_models_is_plain_text(checkout, tmp_path):
  folder = checkout("r1_searcher")
  original = known("r1_searcher", folder)
  written, _ = import_prompts.imported(
    original, "r1_searcher", folder, base=True
  )
  values = tomllib.loads(written)
  assert values["base"] == BASE
  assert not values.keys() & {"system", "prefill"}
  file = tmp_path / "texts.toml"
  file.write_text(written)
  env = aj.get_environment("r1_searcher", str(file))
  text = BASE.replace("{{", "{").replace("}}", "}")
  assert (env.plain, env.system, env.prefill, env.chat) == (text, "", "", False)
  with pytest.raises(ValueError, match="expected one of research, r1_searcher"):
    import_prompts.imported(
      import_prompts.ORIGINALS["ikea"], "ikea", folder, base=True
    )


@pytest.mark.parametrize("system", sorted(import_prompts.ORIGINALS))
def test_the_texts_of_a_checkout_are_the_known_ones(system, tmp_path):
  original = import_prompts.ORIGINALS[system]
  folder = original_checkout(system)
  for base in (False, True)[: 1 + ("base" in original.texts)]:
    written, _ = import_prompts.imported(original, system, folder, base=base)
    (tmp_path / "texts.toml").write_text(written)
    aj.get_environment(system, str(tmp_path / "texts.toml"))


@pytest.mark.parametrize("system", sorted(import_prompts.ORIGINALS))
def test_the_environment_has_the_slots_and_placeholders(system, tmp_path):
  values = dict(aj.WORDINGS[system].texts().values)
  for name, places in import_prompts.ORIGINALS[system].texts.items():
    if name != "base":
      values[name] = ""
    for place in places if name != "base" else ():
      if isinstance(place, str):
        values[name] += place
        continue
      own = [*place.names.values()] or ["Question"] * place.filled
      values[name] += " ".join(f"{{{each}}}" for each in own if each) + "."
  (tmp_path / "texts.toml").write_text(import_prompts.written(values))
  aj.get_environment(system, str(tmp_path / "texts.toml"))


@pytest.mark.parametrize("system", sorted(STAND_INS))
def test_texts_are_read_by_file_and_symbol(system, checkout, tmp_path_factory):
  folder = checkout(system)
  written, kept = import_prompts.imported(known(system, folder), system, folder)
  values = tomllib.loads(written)
  shipped = aj.WORDINGS[system].texts().values
  assert values == {**shipped, **EXPECTED[system]}
  assert kept == sorted(shipped.keys() - EXPECTED[system].keys())
  file = tmp_path_factory.mktemp("out") / "texts.toml"
  file.write_text(written)
  aj.get_environment(system, str(file))


@pytest.mark.parametrize("system", sorted(STAND_INS))
def test_other_words_than_the_known_ones_are_refused(system, checkout):
  folder = checkout(system)
  with pytest.raises(ValueError, match=r"has changed \(sha256 .*--allow_ch"):
    import_prompts.imported(import_prompts.ORIGINALS[system], system, folder)
  written, _ = import_prompts.imported(
    import_prompts.ORIGINALS[system], system, folder, allow_changes=True
  )
  assert tomllib.loads(written).items() >= EXPECTED[system].items()


def test_another_repository_is_refused(checkout, tmp_path):
  folder = checkout("search_r1")
  for name in ("none", "."):
    with pytest.raises(ValueError, match="found no folder|at commit 6ced48f"):
      import_prompts.imported(
        import_prompts.ORIGINALS["search_o1"], "search_o1", folder / name
      )


def test_no_text_of_the_authors_is_shipped_as_it_is():
  hashes = {
    place.sha256
    for original in import_prompts.ORIGINALS.values()
    for places in original.texts.values()
    for place in places
    if isinstance(place, import_prompts.Place)
  }
  assert len(hashes) > 10
  for words in aj.WORDINGS.values():
    for name, text in words.texts().values.items():
      if words.shipped == "paper.toml" and name in ("scaffold", "plain"):
        continue  # The paper prints them.
      assert hashlib.sha256(text.strip().encode()).hexdigest() not in hashes


@hypothesis.given(st.text(st.characters(exclude_categories=["Cs"])))
@hypothesis.example('a"""b\\"')
@hypothesis.example("\r\n\x00\x7f\t")
@hypothesis.example('\n"')
@hypothesis.example('"""')
def test_written_files_read_back_as_they_were(text):
  file = import_prompts.written({"a": text, "b": "x"}, ["of\ta test"])
  assert tomllib.loads(file) == {"a": text, "b": "x"}
