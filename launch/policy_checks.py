"""Checks that a policy's tokenizer and chat template support the protocol."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.environment import protocol
from anysearch_jax.methods import systems
from anysearch_jax.policy import architecture as architecture_lib
from anysearch_jax.policy import hf, table, tensor_files
from anysearch_jax.policy import tokenizer as tokenizer_lib
from anysearch_jax.rollout import episode
from anysearch_jax.rollout.jax_engine import turn
from launch import doctor

_QUESTION = types.Question("doctor", "Which river flows through Paris?", ("",))
_BEFORE_TAGS = ("a ", "a.", "a\n", "a", "?")


class Described(NamedTuple):
  """A policy's folder, without its weights."""

  architecture: architecture_lib.Architecture
  tokenizer: tokenizer_lib.Tokenizer
  words: str


def folder(policy: str) -> Described:
  """Returns architecture, tokenizer and a description of a policy's folder.

  Of the weights only the headers are read.

  Raises:
    ValueError: the folder cannot be used.
  """
  if not policy:
    raise ValueError(
      "policy: found nothing, expected a Hugging Face folder "
      "(--config.policy=FOLDER)."
    )
  a, codec = hf.describe(policy)
  held = tensor_files.headers(policy)
  wanted = {name for row in table.base_rows(a) for name in row.names()}
  if missing := sorted(wanted - held.keys()):
    raise ValueError(
      f"{policy}: lacks tensor {missing[0]!r} ({len(missing)} in all); "
      "copy the folder again."
    )
  return Described(
    a,
    codec,
    f"{policy}: {a.family}, {a.layers} layers of {a.d_model}, "
    f"{codec.vocab_size} tokens",
  )


def texts(
  codec: tokenizer_lib.Tokenizer, config: config_lib.ExperimentConfig
) -> Iterator[doctor.Finding]:
  """Checks the tags, the stop texts and the prompt."""
  yield from _tags(codec)
  yield from _stops(codec, systems.of_episode(config.episode).stops)
  yield from _prompt(codec, config)


def _tags(codec: tokenizer_lib.Tokenizer) -> Iterator[doctor.Finding]:
  """Checks that every tag survives encoding, after any preceding text."""
  lost = [
    tag
    for name in protocol.TAGS
    for tag in (f"<{name}>", f"</{name}>")
    if any(
      tag not in codec.decode(codec.encode(f"{before}{tag} b"))
      for before in _BEFORE_TAGS
    )
  ]
  if lost:
    yield doctor.problem(
      f"the tokenizer loses {', '.join(lost)}",
      "take a tokenizer that writes plain text as it is; tags that are special "
      "tokens of it must be ordinary ones.",
    )
  else:
    yield doctor.ok(f"all {2 * len(protocol.TAGS)} tags survive the tokenizer")


def _stops(
  codec: tokenizer_lib.Tokenizer, texts: Sequence[str]
) -> Iterator[doctor.Finding]:
  """Checks that the engine halts at the token that completes a stop text."""
  halts = turn.halting_tokens(
    codec.token_texts(),
    texts,
    codec.end_of_turn_ids,
    vocab_size=codec.vocab_size,
  )
  missed = []
  for stop in texts:
    for before in _BEFORE_TAGS:
      ids = codec.encode(f"{before}{stop}\n\n")
      ends = [
        n for n in range(1, len(ids) + 1) if stop in codec.decode(ids[:n])
      ]
      if not ends or not halts[ids[ends[0] - 1]]:
        missed.append(f"{before}{stop}")
  if missed:
    yield doctor.problem(
      f"the end of {missed[0]!r} is not found among its tokens "
      f"({len(missed)} such)",
      "take a tokenizer whose tokens have the same text after any other token "
      "(a byte-level BPE).",
    )
  else:
    yield doctor.ok(
      f"{' and '.join(texts)} are found; {int(halts.sum())} of "
      f"{codec.vocab_size} tokens halt a row"
    )


def _prompt(
  codec: tokenizer_lib.Tokenizer, config: config_lib.ExperimentConfig
) -> Iterator[doctor.Finding]:
  """Checks the prompt of a question and the end-of-turn tokens."""
  if not codec.end_of_turn_ids:
    yield doctor.problem(
      "no token ends a turn",
      "name eos_token_id in generation_config.json of the policy's folder.",
    )
  text, ids = episode.prompt(
    _QUESTION,
    budget=config.curriculum.max_budget,
    scaffold=True,
    config=config.episode,
    codec=codec,
  )
  room = config.episode.max_context - len(ids)
  if _QUESTION.text not in text:
    yield doctor.problem(
      "the chat template leaves the question out of the prompt",
      "look at chat_template in the policy's folder.",
    )
  elif room < 1:
    yield doctor.problem(
      f"the prompt takes {len(ids)} tokens of episode.max_context "
      f"{config.episode.max_context}",
      "raise episode.max_context (and engine.max_context, batch.row_lengths).",
    )
  else:
    template = "chat template" if codec.hf.chat_template else "no chat template"
    yield doctor.ok(f"a prompt of {len(ids)} tokens ({template}), {room} left")
  if codec.hf.chat_template:
    yield from _template_end(codec)


def _template_end(codec: tokenizer_lib.Tokenizer) -> Iterator[doctor.Finding]:
  """Warns if the token that the template ends messages with ends no turn."""
  text, _ = codec.render(_QUESTION.text)
  after = text.rpartition(_QUESTION.text)[2].lstrip()
  closing = [t for t in codec.control_tokens if after.startswith(t)]
  if not closing:
    return
  end = max(closing, key=len)
  if codec.hf.convert_tokens_to_ids(end) not in codec.end_of_turn_ids:
    yield doctor.warning(
      f"the chat template ends messages with {end}, which ends no turn",
      "add its id to eos_token_id in generation_config.json.",
    )
