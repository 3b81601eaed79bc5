"""Small random cross-encoders and XLM-RoBERTa encoders in folders."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Sequence

import numpy as np
import tokenizers
import transformers
from tokenizers import models, pre_tokenizers, processors

from anysearch_jax.policy import parameters as weights
from anysearch_jax.policy import tensor_files
from bench import random_encoders
from retrieval.encoder import bert, cross_encoder

SIZES = {
  "hidden_size": 64,
  "num_attention_heads": 2,
  "intermediate_size": 96,
  "num_hidden_layers": 2,
}
_SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")


def classifier(folder: pathlib.Path, family: str, *, labels: int) -> None:
  """Saves a classifier; family: `bert` or `roberta` (XLM-RoBERTa)."""
  if family == "bert":
    a = random_encoders.make("minilm", folder, **SIZES)
    prefix = "bert."
  else:
    a = roberta(folder)
    prefix = "roberta."
  head = cross_encoder.head_rows(family, a, labels)
  _save(folder, a, bert.rows(a, prefix) + head, seed=labels)
  path = folder / "config.json"
  name = "Bert" if family == "bert" else "XLMRoberta"
  said = {
    "architectures": [f"{name}ForSequenceClassification"],
    "id2label": {str(i): f"LABEL_{i}" for i in range(labels)},
    "label2id": {f"LABEL_{i}": i for i in range(labels)},
  }
  path.write_text(json.dumps(json.loads(path.read_text()) | said))


def roberta(folder: pathlib.Path) -> bert.Architecture:
  """Saves an XLM-RoBERTa encoder of 66 positions with its tokenizer."""
  words = dict.fromkeys([*_SPECIAL, *random_encoders.words()])
  tokens = {token: i for i, token in enumerate(words)}
  inner = tokenizers.Tokenizer(models.WordLevel(tokens, "<unk>"))
  inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
  inner.post_processor = processors.TemplateProcessing(
    single="<s> $A </s>",
    pair="<s> $A </s> </s> $B </s>",
    special_tokens=[("<s>", 0), ("</s>", 2)],
  )
  transformers.PreTrainedTokenizerFast(
    tokenizer_object=inner,
    bos_token="<s>",
    cls_token="<s>",
    sep_token="</s>",
    eos_token="</s>",
    pad_token="<pad>",
    unk_token="<unk>",
  ).save_pretrained(folder)
  config = transformers.XLMRobertaConfig(
    architectures=["XLMRobertaModel"],
    vocab_size=len(tokens),
    max_position_embeddings=66,
    type_vocab_size=1,
    layer_norm_eps=1e-5,
    pad_token_id=1,
    **SIZES,
  )
  config.save_pretrained(folder)
  a = bert.from_hf(config.to_dict())
  _save(folder, a, bert.rows(a), seed=0)
  return a


def _save(
  folder: pathlib.Path,
  a: bert.Architecture,
  table: Sequence[weights.Weight],
  seed: int,
) -> None:
  """Saves random float32 weights of which none has its initial value."""
  rng = np.random.default_rng(seed)

  def leaf(row: weights.Weight) -> np.ndarray:
    noise = rng.standard_normal(row.shape, np.float32)
    if len(row.layer_shape) == 1:
      return 0.2 * noise + (row.init is None)
    return noise * a.d_model**-0.5

  tensor_files.save(folder, weights.tree(table, leaf), table)
