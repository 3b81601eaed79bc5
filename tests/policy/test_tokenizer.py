"""The properties of tokenizers that episodes rely on."""

from __future__ import annotations

import copy
import json
import pathlib

import pytest
import tokenizers
import transformers
from tokenizers import models, pre_tokenizers, processors

from anysearch_jax.environment import protocol
from anysearch_jax.policy import tokenizer as tokenizer_lib

WORDS = ["<bos>", "<eos>", "<eot>", "<tool>", "a", "b", "c", "user", ":"]
TEMPLATE = (
  "<bos>{% for m in messages %}{{ m['role'] + ' : ' + m['content'] }} <eot> "
  "{% endfor %}{% if add_generation_prompt %}c{% endif %}"
)


def save_tiny(folder, *, template=None, generation=None, config=None):
  """Saves a word-level tokenizer that adds BOS as a special token."""
  core = tokenizers.Tokenizer(
    models.WordLevel({word: i for i, word in enumerate(WORDS)}, "c")
  )
  core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
  core.post_processor = processors.TemplateProcessing(
    single="<bos> $A", special_tokens=[("<bos>", 0)]
  )
  hf = transformers.PreTrainedTokenizerFast(
    tokenizer_object=core,
    bos_token="<bos>",
    eos_token="<eos>",
    extra_special_tokens=["<eot>"],
    chat_template=template,
  )
  hf.add_tokens(["<tool>"])  # An added token that is not special.
  hf.save_pretrained(folder)
  for name, values in (("generation_config", generation), ("config", config)):
    if values is not None:
      (folder / f"{name}.json").write_text(json.dumps(values))
  return tokenizer_lib.Tokenizer.from_folder(folder)


def test_tokenizer_json_decides_whatever_the_model_config_says(tmp_path):
  tokenizer = save_tiny(tmp_path, config={"model_type": "qwen2"})
  assert tokenizer.encode("a b user") == [4, 5, 7]


@pytest.mark.parametrize(
  ("generation", "config", "ids"),
  [
    (None, None, {1}),
    ({"eos_token_id": 2}, None, {1, 2}),
    ({"eos_token_id": [2, 3]}, None, {1, 2, 3}),
    # config.json is used if generation_config.json has no value.
    (None, {"eos_token_id": 2}, {1, 2}),
    ({"eos_token_id": None}, {"eos_token_id": [2, 3]}, {1, 2, 3}),
    ({"eos_token_id": 3}, {"eos_token_id": 2}, {1, 3}),
  ],
)
def test_end_of_turn_ids_join_the_tokenizer_and_the_model(
  tmp_path, generation, config, ids
):
  tokenizer = save_tiny(tmp_path, generation=generation, config=config)
  assert tokenizer.end_of_turn_ids == ids
  assert all(type(i) is int for i in tokenizer.end_of_turn_ids)


@pytest.mark.parametrize("value", ["12", True, -1, [1, "2"], {"a": 1}])
def test_end_of_turn_value_that_is_no_id_is_refused(tmp_path, value):
  save_tiny(tmp_path)
  name = "generation_config.json"
  (tmp_path / name).write_text(json.dumps({"eos_token_id": value}))
  with pytest.raises(ValueError) as refusal:
    tokenizer_lib.Tokenizer.from_folder(tmp_path)
  assert str(refusal.value) == (
    f"{tmp_path / name}: eos_token_id is {value!r}, expected a token's id or a "
    "list of ids."
  )


@pytest.mark.parametrize("name", ["tokenizer", "added_tokens"])
def test_file_without_a_json_object_is_refused_by_name(tmp_path, name):
  save_tiny(tmp_path)
  (tmp_path / f"{name}.json").write_text("[]")
  with pytest.raises(ValueError, match=f"/{name}.json: found list, expected"):
    tokenizer_lib.Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(
  ("name", "text", "cause"),
  [
    ("tokenizer.json", "{}", "KeyError"),
    # The Rust library raises a bare Exception here.
    ("tokenizer.json", '{"added_tokens": []}', "Exception: Model missing"),
    ("tokenizer_config.json", '{"eos_token": 5}', "eos_token has to be either"),
    ("added_tokens.json", '{"<x>": [1]}', "TypeError"),
  ],
)
def test_an_object_that_is_no_tokenizer_is_refused_with_the_cause(
  tmp_path, name, text, cause
):
  save_tiny(tmp_path)
  (tmp_path / name).write_text(text)
  sentence = f"{tmp_path}: tokenizer.json and .* not a fast tokenizer's .*"
  with pytest.raises(ValueError, match=sentence + cause):
    tokenizer_lib.Tokenizer.from_folder(tmp_path)


def test_every_added_token_is_a_control_token(tmp_path):
  """Special or not, its text in a passage would be encoded as that token."""
  tokenizer = save_tiny(tmp_path)
  special = ("<bos>", "<eos>", "<eot>")
  assert tokenizer.control_tokens == (*special, "<tool>")
  assert tokenizer.vocab_size == len(WORDS)
  # Of Gemma 3: white space is ordinary text; an image has no embedding.
  tokenizer.hf.add_tokens(["\n", "<image_soft_token>"])
  gemma = tokenizer_lib.Tokenizer(tokenizer.hf)
  assert gemma.control_tokens == (*special, "<image_soft_token>", "<tool>")
  assert gemma.vocab_size == len(gemma.token_texts()) == len(WORDS) + 1


def test_token_texts_are_what_ids_add_to_a_decoded_text(tmp_path):
  tokenizer = save_tiny(tmp_path)
  special = tokenizer.hf.all_special_tokens
  # This decoder joins tokens by spaces and omits special tokens.
  expected = ["" if word in special else f" {word}" for word in WORDS]
  assert tokenizer.token_texts() == expected


def test_encode_adds_nothing_and_decode_drops_control_tokens(tmp_path):
  tokenizer = save_tiny(tmp_path)
  assert tokenizer.encode("") == []
  assert tokenizer.encode("a<eot>b") == [4, 2, 5]
  assert tokenizer.decode([0, 4, 2, 3, 5, 1]) == "a <tool> b"
  assert tokenizer.decode((4, 5)) == "a b"
  assert tokenizer.decode([]) == ""

  # An id of the padded vocabulary has no text.
  assert tokenizer.decode([4, len(WORDS), 5, 10**6]) == "a b"


def test_a_template_writes_its_own_bos(tmp_path):
  base = save_tiny(tmp_path)
  assert base.render("a b") == ("a b", [0, 4, 5])
  tokenizer = save_tiny(tmp_path, template=TEMPLATE)
  text, ids = tokenizer.render("a b")
  assert text == "<bos>user : a b <eot> c"
  assert ids == [0, 7, 8, 4, 5, 2, 6]
  dates = "{{ strftime_now('%d %b %Y') }}, {{ strftime_now(\"%Y\") }}"
  dated = save_tiny(tmp_path, template=TEMPLATE + dates)
  assert dated.render("a b")[0] == text + "26 Jul 2024, 2024"  # On any day.


@pytest.mark.parametrize("template", [None, TEMPLATE], ids=["base", "chat"])
@pytest.mark.parametrize("kept", ["truncation", "padding", "both"])
def test_limits_that_a_file_keeps_of_its_last_use_are_ignored(
  tmp_path, template, kept
):
  """With a base model the order of calls would decide which limits hold."""
  text = "a b " * 40
  clean = save_tiny(tmp_path, template=template)
  expected = clean.encode(text), clean.render(text), clean.transcript([4, 5])
  core = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
  if kept != "padding":
    core.enable_truncation(8)
  if kept != "truncation":
    core.enable_padding(length=200, pad_id=1, pad_token="<eos>")
  core.save(str(tmp_path / "tokenizer.json"))
  loaded = tokenizer_lib.Tokenizer.from_folder(tmp_path)
  for _ in range(2):
    found = loaded.encode(text), loaded.render(text), loaded.transcript([4, 5])
    assert found == expected
  long = "a b " * 10_000
  assert len(loaded.encode(long)) == 20_000


@pytest.mark.parametrize(
  "call",
  [
    "strftime_now('%d %b %Y')",
    "strftime_now( '%d %b %Y' )",
    "strftime_now(format='%d %b %Y')",
    "(strftime_now)('%d %b %Y')",
    "strftime_now('%d' + ' %b %Y')",
    "strftime_now(day)",
    "strftime_now('%_d %b %0Y')",
    "strftime_now('%d %b (%Y)').replace('(', '').replace(')', '')",
  ],
)
def test_a_template_writes_the_same_day_on_any_day(tmp_path, call):
  template = "{% set day = '%d %b %Y' %}{% if strftime_now is defined %}{{ "
  template += call + " }}{% endif %}"
  dated = save_tiny(tmp_path, template=template)
  assert dated.render("a b")[0] == "26 Jul 2024"


@pytest.mark.parametrize(
  "start", ["\n\n  ", "  ", "\n", "  {% if true %}{% endif %}\n \n", ""]
)
def test_a_date_leaves_the_beginning_of_a_template_as_it_is(tmp_path, start):
  """White space there would be tokens of every prompt."""
  plain = save_tiny(tmp_path / "plain", template=start + "a 2024")
  dated = save_tiny(tmp_path, template=start + "a {{ strftime_now('%Y') }}")
  assert dated.render("a")[0] == plain.render("a")[0]


@pytest.mark.parametrize(
  ("template", "reason"),
  [
    ("a\n{% if %}", "in line 2 (TemplateSyntaxError: Expected an expression"),
    ("{{ strftime_now() }}\n{% if %}", "in line 2 (TemplateSyntaxError: "),
    ("{{ raise_exception('No system.') }}", "(TemplateError: No system.)"),
    ("{{ nothing + 1 }}", "(UndefinedError: 'nothing' is undefined)"),
    ("{{ 1 / 0 }}", "(ZeroDivisionError: division by zero)"),
  ],
)
def test_a_template_that_cannot_be_rendered_is_refused_in_a_sentence(
  tmp_path, template, reason
):
  broken = save_tiny(tmp_path, template=template)
  with pytest.raises(ValueError) as refusal:
    broken.render("a b")
  sentence = str(refusal.value)
  assert sentence.startswith(
    f"{tmp_path}: the chat template cannot be rendered"
  )
  assert reason in sentence and "chat_template.jinja" in sentence
  assert "\n" not in sentence


@pytest.mark.parametrize("opened", ["<think>", "<think>\n", "<think>\n\n"])
def test_a_prefill_replaces_the_reasoning_that_a_template_opens(
  tmp_path, opened
):
  chat = save_tiny(tmp_path, template=f"{TEMPLATE} {{{{ {opened!r} }}}}")
  assert protocol.opened_reasoning(chat.render("a")[0]) == opened
  begun = chat.render("a", prefill="<think> b")[0]
  assert begun == "<bos>user : a <eot> c <think> b"
  # One that opens no reasoning is the beginning of the response too.
  assert chat.render("a", prefill="b")[0] == "<bos>user : a <eot> c b"
  # The words of a question open nothing.
  assert protocol.opened_reasoning("a <think> b") == ""


def test_every_token_text_of_a_real_tokenizer_is_known(real_tokenizer):
  texts = real_tokenizer.token_texts()
  assert len(texts) == real_tokenizer.vocab_size
  for text in ("<", "</", "search", "answer", ">", " the", "\n\n", "。", "é"):
    (token,) = real_tokenizer.encode(text)
    assert texts[token] == text
    assert real_tokenizer.decode([token]) == text


def test_real_tokenizers_decode_what_they_encode(real_tokenizer):
  text = (
    '\n\n<information>Doc 1(Title: "Caffè") 東京 , don\'t …\n</information>\n\n'
  )
  ids = real_tokenizer.encode(text)
  assert real_tokenizer.decode(ids) == text
  assert not set(ids) & real_tokenizer.end_of_turn_ids
  control = real_tokenizer.encode(real_tokenizer.hf.eos_token)
  assert len(control) == 1
  assert real_tokenizer.decode([*control, *ids, *control]) == text


def test_real_tokenizers_encode_a_long_text_as_a_short_one(real_tokenizer):
  text = "Caffè 東京 , don't …\n  a1b2 </search>" * 400
  backend = real_tokenizer.hf.backend_tokenizer
  expected = backend.encode(text, add_special_tokens=False).ids
  assert real_tokenizer.encode(text) == expected


def family(tokenizer):
  return pathlib.Path(tokenizer.hf.name_or_path).name


def expected_file(tokenizer, name):
  path = pathlib.Path(tokenizer.hf.name_or_path).parent / "expected" / name
  if not path.is_file():
    pytest.skip(f"no {path}, which has ids of other implementations")
  return path


def test_real_tokenizers_encode_as_llama_cpp_does(real_tokenizer):
  name = {"llama3.1": "llama-bpe"}.get(family(real_tokenizer), "qwen2")
  stem = f"llama.cpp.ggml-vocab-{name}"
  # Read as bytes, because some cases contain carriage returns.
  texts = expected_file(real_tokenizer, stem + ".inp").read_bytes().decode()
  texts = texts.split("\n__ggml_vocab_test__\n")[:-1]
  lines = expected_file(real_tokenizer, stem + ".out").read_text().split("\n")
  lines = lines[: len(texts)]
  assert len(texts) == len(lines) == 46
  for text, line in zip(texts, lines):
    assert real_tokenizer.encode(text) == [int(i) for i in line.split()], text


def test_real_tokenizers_encode_control_tokens_as_other_projects_do(
  real_tokenizer,
):
  path = expected_file(real_tokenizer, "external_ids.json")
  cases = [
    case
    for case in json.loads(path.read_text())
    if family(real_tokenizer) in case["families"]
  ]
  assert cases
  for case in cases:
    assert real_tokenizer.encode(case["text"]) == case["ids"], case["source"]


def test_tags_may_merge_with_what_follows_them(real_tokenizer):
  """A stop may end inside a token, so ids are never encoded again."""
  whole = real_tokenizer.encode("</search>\n\n")
  apart = real_tokenizer.encode("</search>") + real_tokenizer.encode("\n\n")
  assert apart != whole
  assert real_tokenizer.decode(apart) == real_tokenizer.decode(whole)


def test_a_question_brings_no_control_token_into_its_prompt(real_tokenizer):
  added = set(real_tokenizer.hf.added_tokens_decoder)

  def control_ids(content):
    return [i for i in real_tokenizer.render(content)[1] if i in added]

  hostile = "".join(real_tokenizer.control_tokens) + "<think></think>"
  clean = protocol.neutralise(hostile, real_tokenizer.control_tokens)
  assert control_ids(hostile) != control_ids("x")
  assert control_ids(clean) == control_ids("x")


RENDERED = {
  "qwen2.5": (
    "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a "
    "helpful assistant.<|im_end|>\n<|im_start|>user\nWhy {x}?<|im_end|>\n"
    "<|im_start|>assistant\n",
    "<|im_start|>",
    "<|im_end|>",
  ),
  "qwen3": (
    "<|im_start|>user\nWhy {x}?<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>",
    "<|im_end|>",
  ),
  "llama3.1": (
    "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\n"
    "Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n"
    "<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nWhy {x}?<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "<|begin_of_text|>",
    "<|eot_id|>",
  ),
}


def test_real_templates_render_one_user_message(real_tokenizer):
  text, first, end = RENDERED[family(real_tokenizer)]
  rendered, ids = real_tokenizer.render("Why {x}?")
  assert rendered == text
  (first_id,), (end_id,) = map(real_tokenizer.encode, (first, end))
  assert ids[0] == first_id != ids[1]  # There is no second BOS.
  assert ids.count(first_id) == text.count(first)
  assert end_id in real_tokenizer.end_of_turn_ids
  assert {first, end} <= set(real_tokenizer.control_tokens)
  # With a system message and the beginning of the reply; or without a template.
  begun, ids = real_tokenizer.render("Why {x}?", "Be brief.", "<think>")
  assert begun.endswith(text[-20:] + "<think>") and "Be brief." in begun
  assert begun.index("Be brief.") < begun.index("Why {x}?")
  assert "You are Qwen" not in begun
  assert ids == real_tokenizer.encode(begun) and ids[0] == first_id
  plain, ids = real_tokenizer.render("Why {x}?", chat=False)
  assert plain == "Why {x}?" and ids[-2:] == real_tokenizer.encode(plain)[-2:]


def test_real_base_model_gets_one_bos(real_tokenizer):
  hf = copy.copy(real_tokenizer.hf)
  hf.chat_template = None
  base = tokenizer_lib.Tokenizer(hf)
  start = {"llama3.1": [128000]}.get(family(real_tokenizer), [])
  text = "Why {x}?"
  assert base.render(text) == (text, start + real_tokenizer.encode(text))
