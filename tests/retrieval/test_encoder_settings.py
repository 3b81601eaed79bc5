"""Settings of encoders: from arguments, the folder, or E5's name."""

from __future__ import annotations

import json
import shutil

import pytest
import random_encoders

from anysearch_jax.retrieval.encoder import encoder as encoder_lib
from anysearch_jax.retrieval.encoder import encoder_settings

folder = random_encoders.folder
own = random_encoders.own
write = random_encoders.write


def settle(folder, **given):
  return encoder_settings.settle(
    folder, model_tokens=64, max_tokens=64, **given
  )


E5 = ("query: ", "passage: ")
NOMIC = ("search_query: ", "search_document: ")


@pytest.mark.parametrize(
  ("name", "expected"),
  [
    ("e5-base-v2", E5),
    ("models--intfloat--e5-small/snapshots/0a1b", E5),
    ("all-MiniLM-L6-v2", ("", "")),
    ("base5", ("", "")),
    ("e5/bge-small", ("", "")),
    ("models--nomic-ai--modernbert-embed-base/snapshots/0a1b", NOMIC),
    ("nomic-embed-text-v1.5", ("", "")),
  ],
)
def test_prefixes_follow_from_the_name_alone(folder, tmp_path, name, expected):
  settings = settle(shutil.copytree(folder, tmp_path / name))
  assert (settings.query_prefix, settings.passage_prefix) == expected
  assert settings.pooling == "mean"


def test_gte_modernbert_s_vector_is_that_of_the_first_token(own):
  gte = own.rename(own.with_name("gte-modernbert-base"))
  expected = encoder_settings.EncoderSettings("cls", "", "", 64)
  assert settle(gte) == expected
  assert settle(gte, pooling="mean").pooling == "mean"
  sentence_transformers(gte, MEAN)
  assert settle(gte).pooling == "mean"


def test_name_of_the_base_model_counts_too(own):
  config = json.loads((own / "config.json").read_text())
  write(own / "config.json", config | {"_name_or_path": "intfloat/e5-small"})
  assert settle(own).query_prefix == "query: "
  write(own / "config.json", config | {"_name_or_path": "/e5/bert"})
  assert settle(own).query_prefix == ""


def sentence_transformers(folder, pooling, prompts=None) -> None:
  kinds = ("", "Transformer"), ("1_Pooling", "Pooling"), ("2_N", "Normalize")
  modules = [
    {"idx": i, "path": path, "type": f"sentence_transformers.models.{kind}"}
    for i, (path, kind) in enumerate(kinds)
  ]
  write(folder / "modules.json", modules)
  write(folder / "1_Pooling" / "config.json", pooling)
  if prompts is not None:
    write(folder / "config_sentence_transformers.json", {"prompts": prompts})


MEAN = {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}
CLS = {"pooling_mode_mean_tokens": False, "pooling_mode_cls_token": True}


@pytest.mark.parametrize(
  ("pooling", "prompts", "expected"),
  [
    (MEAN, None, ("mean", "", "")),
    (CLS, {}, ("cls", "", "")),
    ({"pooling_mode": "cls"}, None, ("cls", "", "")),
    (CLS, {"query": "Represent: "}, ("cls", "Represent: ", "")),
    (MEAN, {"query": "q ", "passage": "p "}, ("mean", "q ", "p ")),
    (MEAN, {"query": "q ", "document": None}, ("mean", "q ", "")),
  ],
)
def test_sentence_transformers_files_say_how_to_pool_and_prefix(
  own, pooling, prompts, expected
):
  sentence_transformers(own, pooling, prompts)
  assert settle(own) == encoder_settings.EncoderSettings(*expected, 64)
  given = settle(own, pooling="mean", passage_prefix="x ", query_prefix="")
  assert given == encoder_settings.EncoderSettings("mean", "", "x ", 64)


def test_empty_prompts_do_not_hide_that_a_model_is_e5(own):
  e5 = own.rename(own.with_name("e5-small"))
  sentence_transformers(e5, MEAN, {"query": "", "document": ""})
  assert settle(e5).passage_prefix == "passage: "
  sentence_transformers(e5, MEAN, {"query": "other: "})
  assert settle(e5).query_prefix == "other: "
  assert settle(e5).passage_prefix == ""


@pytest.mark.parametrize(
  ("pooling", "sentence"),
  [
    ({"pooling_mode_max_tokens": True}, "by pooling_mode_max_tokens is not"),
    (MEAN | {"pooling_mode_cls_token": True}, "pooling by .*, .* is not supp"),
    ({}, "pooling by nothing is not supported"),
    (MEAN | {"include_prompt": False}, "expected .*, prompts included"),
    (
      {"pooling_mode": "mean", "include_prompt": False},
      "expected .*, prompts included",
    ),
    ({"pooling_mode": "max"}, "pooling: found 'max', expected one"),
    ([], "found list, expected a JSON object"),
  ],
)
def test_another_pooling_is_refused_by_name(
  own, nothing_loads, pooling, sentence
):
  sentence_transformers(own, pooling)
  with pytest.raises(ValueError, match=sentence):
    encoder_lib.Encoder(own)


def test_a_default_prompt_is_for_the_sides_that_have_none(own):
  path = own / "config_sentence_transformers.json"
  prompts = {"retrieval": "r: ", "document": ""}
  write(path, {"prompts": prompts, "default_prompt_name": "retrieval"})
  assert settle(own).query_prefix == "r: "
  assert settle(own).passage_prefix == ""
  write(path, {"prompts": prompts, "default_prompt_name": None})
  assert settle(own).query_prefix == ""


def test_what_is_not_computed_is_refused_by_name(own, nothing_loads):
  path = own / "sentence_bert_config.json"
  write(path, {"max_seq_length": 512, "do_lower_case": False})
  assert settle(own).pooling == "mean"
  write(path, {"max_seq_length": 512, "do_lower_case": True})
  with pytest.raises(ValueError, match="do_lower_case is not supported"):
    encoder_lib.Encoder(own)
  path.unlink()
  sentence_transformers(own, MEAN)
  modules = json.loads((own / "modules.json").read_text())
  dense = {"path": "2_Dense", "type": "sentence_transformers.models.Dense"}
  write(own / "modules.json", [*modules, dense])
  with pytest.raises(ValueError, match="module 'Dense' is not supported"):
    encoder_lib.Encoder(own)
  # Naming the pooling says that it is known.
  assert settle(own, pooling="mean").pooling == "mean"
  write(own / "adapter_config.json", {"peft_type": "LORA"})
  with pytest.raises(ValueError, match="found adapter_config.json, whose"):
    encoder_lib.Encoder(own)


@pytest.mark.parametrize(
  ("folder", "name"),
  [
    ("models--intfloat--e5-base-v2/snapshots/0a1b", "intfloat/e5-base-v2"),
    ("e5-base-v2", "intfloat/e5-base-v2"),
    ("my-e5", "my-e5"),
    ("bge", "bge"),
  ],
)
def test_a_model_is_named_as_the_hub_names_it(tmp_path, folder, name):
  assert encoder_settings.model_name(tmp_path / folder) == name
