"""The generated world's tokenizer, with one token for every word.

It is a word-level Hugging Face tokenizer. White space separates words and is
dropped; tags and the environment's fixed phrases are single words, even next to
other characters. Decoding joins words by single spaces, and encoding that text
again gives the same ids.
"""

from __future__ import annotations

import re

import tokenizers
import transformers
from tokenizers import models, pre_tokenizers

from anysearch_jax.environment import prompts, protocol
from anysearch_jax.world import world as world_lib

PAD = "<|pad|>"
UNKNOWN = "<|unknown|>"
USER = "<|user|>"
ASSISTANT = "<|assistant|>"
END = "<|end|>"  # Ends a turn.
CONTROL = (PAD, UNKNOWN, USER, ASSISTANT, END)

# The words of the expert's thoughts.
THOUGHTS = (
  "need",
  "recall",
  "guess",
  "found",
  "nothing",
  "conflict",
  "sufficient",
  "missing",
  "ample",
  "tight",
  "empty",
)

# The environment's phrases around ranks, titles and numbers.
_PHRASES = (
  *(f"Doc {rank}(Title:" for rank in range(1, 6)),
  "No results found.",
  "remaining=",
  "used=",
  "total=",
)
_MARKS = (")", ";", "?")
_LARGEST_NUMBER = 20

_TEMPLATE = (
  "{% for message in messages %}"
  "{{ '<|' + message['role'] + '|> ' + message['content'] + ' <|end|> ' }}"
  "{% endfor %}"
  "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def vocabulary(world: world_lib.World) -> list[str]:
  """Returns the tokens of the world in the order of their ids; padding is 0."""
  lines = prompts.PROMPTS["world"]
  texts = (lines.scaffold, lines.plain, lines.over_budget, lines.no_action)
  words = [
    *CONTROL,
    *protocol.tags(),
    *_PHRASES,
    *_MARKS,
    *map(str, range(_LARGEST_NUMBER + 1)),
    *re.sub(r"\{\w+\}", " ", " ".join(texts)).split(),
    *THOUGHTS,
    *(relation.name for relation in world_lib.RELATIONS),
    *(relation.alternative for relation in world_lib.RELATIONS),
    world_lib.VERDICT,
    world_lib.CONFIRMED,
    *world_lib.PADS,
    *world.entities,
  ]
  return list(dict.fromkeys(words))


def build_tokenizer(
  world: world_lib.World,
) -> transformers.PreTrainedTokenizerFast:
  """Builds the tokenizer with its chat template; `<|end|>` ends a turn.

  The world's entities become words. Its length is the number of ids in use.
  """
  ids = {word: i for i, word in enumerate(vocabulary(world))}
  core = tokenizers.Tokenizer(models.WordLevel(ids, unk_token=UNKNOWN))
  fixed = [word for word in ids if not re.fullmatch(r"\w+", word)]
  escaped = (re.sub(r"(\W)", r"\\\1", word) for word in fixed)
  pattern = "|".join([*escaped, r"\w+", r"[^\w\s]"])
  # `invert` keeps the matches of the pattern and removes the text between them.
  core.pre_tokenizer = pre_tokenizers.Split(
    tokenizers.Regex(pattern), behavior="removed", invert=True
  )
  return transformers.PreTrainedTokenizerFast(
    tokenizer_object=core,
    pad_token=PAD,
    unk_token=UNKNOWN,
    eos_token=END,
    extra_special_tokens=[USER, ASSISTANT],
    chat_template=_TEMPLATE,
    clean_up_tokenization_spaces=False,
  )
