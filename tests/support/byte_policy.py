"""A random policy that reads any text: a token for each byte."""

from __future__ import annotations

import pathlib

import small_policy
import tokenizers
import transformers
from tokenizers import decoders, models, pre_tokenizers

from anysearch_jax.policy import decoder, hf
from anysearch_jax.policy import tokenizer as tokenizer_lib


def tokenizer() -> tokenizer_lib.Tokenizer:
  """Returns a tokenizer of single bytes and an end of turn."""
  alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
  vocabulary = {text: i for i, text in enumerate(["<end>", *alphabet])}
  backend = tokenizers.Tokenizer(models.BPE(vocabulary, []))
  backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  backend.decoder = decoders.ByteLevel()
  backend.add_special_tokens(["<end>"])
  return tokenizer_lib.Tokenizer(
    transformers.PreTrainedTokenizerFast(
      tokenizer_object=backend, eos_token="<end>"
    )
  )


def save(folder: pathlib.Path) -> None:
  """Writes a random policy of one layer as a Hugging Face folder."""
  codec = tokenizer()
  a = small_policy.qwen3(codec.vocab_size)
  hf.save(folder, hf.Policy(decoder.initialize(a, 0), a, codec))
