"""`research.import_prompts`, on sources by hand and on checkouts, if any."""

from __future__ import annotations

import dataclasses
import hashlib
import tomllib

import hypothesis
import pytest
from hypothesis import strategies as st
from test_originals import checkout

import anysearch_jax as aj
from research import import_prompts, methods

SYSTEMS = sorted(import_prompts.ORIGINALS)
# A source, how its text is read, and the text.
FORMS = [
  ("A = '''{B}: {Question}'''", {"filled": True}, "{B}: {Question}"),
  ("def f():\n  a = ('No ' '{x}.')", {}, "No {{x}}."),
  ("a = [{'content': '''Think, \\\nthen.'''}]", {}, "Think, then."),
  (
    "a.append(f'\\nNo {{x}}. {q}')",
    {"names": {"q": "Question"}},
    "\nNo {{x}}. {Question}",
  ),
  (
    'a = f"{BEGIN}\\nOver.\\n{END}"',
    {"names": {"BEGIN": "", "END": ""}, "inner": True},
    "Over.",
  ),
  (
    'a = "Think {{twice}}: {question}"',
    {"names": {"question": "Question"}, "filled": True},
    "Think {{twice}}: {Question}",
  ),
]


def original(text, line=2, **form):
  """Returns the original of a repository that has this text in `a.py`."""
  digest = hashlib.sha256(text.encode()).hexdigest()
  place = import_prompts.Place("a.py", line, digest, **form)
  texts = {"system": (place,), "prompt": ("{Question}",), "base": (place,)}
  return import_prompts.Original("x/y", "6ced48f5d97c", texts)


def imported(folder, source, known, **options):
  ended = 'raise SystemExit("It must not be executed.")\n'
  (folder / "a.py").write_text(ended + source)
  return import_prompts.imported(known, "research", folder, **options)


@pytest.mark.parametrize(("source", "form", "text"), FORMS)
def test_a_text_is_found_by_its_hash(tmp_path, source, form, text):
  written, kept = imported(tmp_path, source, original(text, 99, **form))
  shipped = methods.wording("research").texts().values
  own = {"system": text, "prompt": "{Question}"}
  assert tomllib.loads(written) == {**shipped, **own}
  assert kept == sorted(shipped.keys() - own.keys())


def test_other_words_than_the_known_ones_are_refused(tmp_path):
  known = original("Known.")
  for source, found in (
    ('a = ["x", "Changed."]', "Changed."),
    ('a = f"Changed. {x}"', None),  # What is x?
    ('\na = "Moved and changed."', None),
  ):
    with pytest.raises(
      ValueError, match="expected it at line 2, as in .*6ced4"
    ):
      imported(tmp_path, source, known)
    if found is None:
      with pytest.raises(ValueError, match="found no text with sha256"):
        imported(tmp_path, source, known, allow_changes=True)
    else:
      written, _ = imported(tmp_path, source, known, allow_changes=True)
      assert tomllib.loads(written)["system"] == found
  (tmp_path / "a.py").unlink()
  for folder in (tmp_path, tmp_path / "none"):
    with pytest.raises(ValueError, match="found no"):
      import_prompts.imported(known, "research", folder)


def test_the_prompt_of_base_models_is_plain_text(tmp_path):
  source, form, text = FORMS[-1]
  written, _ = imported(tmp_path, source, original(text, **form), base=True)
  file = tmp_path / "texts.toml"
  file.write_text(written)
  assert not tomllib.loads(written).keys() & {"system", "prefill"}
  env = aj.get_environment(methods.prompts_name("research"), str(file))
  plain = "Think {twice}: {Question}"
  assert (env.plain, env.system, env.prefill, env.chat) == (
    plain,
    "",
    "",
    False,
  )
  ikea = import_prompts.ORIGINALS["ikea"]
  with pytest.raises(ValueError, match="expected one of research, r1_searcher"):
    import_prompts.imported(ikea, "ikea", tmp_path, base=True)


@pytest.mark.parametrize("system", SYSTEMS)
def test_the_texts_of_a_checkout_are_the_known_ones(system, tmp_path):
  original, folder = import_prompts.ORIGINALS[system], checkout(system)
  by_line = {
    name: tuple(
      each if isinstance(each, str) else dataclasses.replace(each, sha256="")
      for each in places
    )
    for name, places in original.texts.items()
  }
  unknown = dataclasses.replace(original, texts=by_line)
  for base in (False, True)[: 1 + ("base" in original.texts)]:
    found = import_prompts.imported(original, system, folder, base=base)
    (tmp_path / "texts.toml").write_text(found[0])
    aj.get_environment(
      methods.prompts_name(system), str(tmp_path / "texts.toml")
    )
    assert found == import_prompts.imported(
      unknown, system, folder, base=base, allow_changes=True
    )


@pytest.mark.parametrize("system", SYSTEMS)
def test_the_environment_has_the_slots_and_placeholders(system, tmp_path):
  values = dict(methods.wording(system).texts().values)
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
  aj.get_environment(methods.prompts_name(system), str(tmp_path / "texts.toml"))


def test_no_text_of_the_authors_is_shipped_as_it_is():
  hashes = {
    place.sha256
    for original in import_prompts.ORIGINALS.values()
    for places in original.texts.values()
    for place in places
    if isinstance(place, import_prompts.Place)
  }
  assert len(hashes) > 10
  plug_ins = (
    aj.get_method(methods.method_name(system)).wordings
    for system in methods.COMPARED
  )
  for words in (
    w for known in (aj.WORDINGS, *plug_ins) for w in known.values()
  ):
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
