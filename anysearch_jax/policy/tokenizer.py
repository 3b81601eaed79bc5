"""The text side of a Hugging Face tokenizer, as the episode needs it."""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Sequence

import transformers

from anysearch_jax.environment import protocol
from anysearch_jax.host import json_files

_LONG = 8192  # Characters of a text that takes milliseconds to encode.
_LLAMA_DATE = "26 Jul 2024"


class Tokenizer:
  """`types.TextCodec` over a fast Hugging Face tokenizer.

  Token ids are never re-encoded: `encode` is for prompts and for what the
  environment writes, `decode` for what the model sampled.

  Attributes:
    end_of_turn_ids: ids that end a turn (generation_config's and the
      tokenizer's own).
    control_tokens: strings of the added tokens but the protocol's tags;
      they must never be read in a question or a passage.
    vocab_size: ids are below this number.
  """

  def __init__(
    self,
    hf: transformers.PreTrainedTokenizerBase,
    *,
    end_of_turn_ids: Sequence[int] = (),
  ):
    self.hf = hf
    ids = {int(i) for i in end_of_turn_ids}
    if hf.eos_token_id is not None:
      ids.add(int(hf.eos_token_id))
    self.end_of_turn_ids = frozenset(ids)
    # Added tokens become their own ids wherever their text stands. The
    # protocol's tags are neutralised as tags, for every tokenizer alike.
    self.control_tokens = tuple(
      sorted(
        token.content
        for token in hf.added_tokens_decoder.values()
        if not protocol.TAG_PATTERN.fullmatch(token.content)
      )
    )
    self.vocab_size = len(hf)

  @classmethod
  def from_folder(cls, folder: str | pathlib.Path) -> Tokenizer:
    """Reads a Hugging Face folder.

    Raises:
      ValueError: the folder holds no tokenizer, or a damaged one.
    """
    folder = pathlib.Path(folder)
    if not (folder / "tokenizer.json").is_file():
      raise ValueError(
        f"{folder}: no tokenizer.json; expected a Hugging Face folder with a "
        "fast tokenizer."
      )
    # Not AutoTokenizer: for a Qwen config.json it builds a byte-level BPE from
    # the vocabulary, whatever kind of tokenizer tokenizer.json describes.
    try:
      hf = transformers.PreTrainedTokenizerFast.from_pretrained(
        folder, local_files_only=True
      )
    # The libraries raise whatever a damaged file leads to, bare Exceptions too.
    except Exception as error:
      for path in sorted(folder.glob("*token*.json")):
        json_files.read(path)
      raise ValueError(
        f"{folder}: tokenizer.json and the files beside it are not a fast "
        f"tokenizer's ({type(error).__name__}: {error}); copy them again."
      ) from error
    return cls(hf, end_of_turn_ids=_end_of_turn_ids(folder))

  def encode(self, text: str) -> list[int]:
    """Ids of plain text, no special token added."""
    backend = self.hf.backend_tokenizer
    if len(text) < _LONG:
      return backend.encode(text, add_special_tokens=False).ids
    # This one lets other threads run meanwhile; `encode` holds the GIL.
    return backend.encode_batch([text], add_special_tokens=False)[0].ids

  def decode(self, ids: Sequence[int]) -> str:
    """Text of ids, control tokens left out."""
    return self.hf.backend_tokenizer.decode(list(ids), skip_special_tokens=True)

  def render(self, content: str) -> tuple[str, list[int]]:
    """One user message through the chat template, generation prompt added.

    A tokenizer without a template (a base model) gets the raw text. The
    template writes its own BOS where the family has one.

    Returns:
      The prompt text and its ids.
    """
    text, ids = self._rendered(content)
    return text, list(ids)

  @functools.lru_cache(maxsize=4096)  # noqa: B019  (one tokenizer a process)
  def _rendered(self, content: str) -> tuple[str, tuple[int, ...]]:
    """The samples of a group ask for the same prompt."""
    if self.hf.chat_template is None:
      return content, tuple(self.hf(content)["input_ids"])
    text = self.hf.apply_chat_template(
      [{"role": "user", "content": content}],
      tokenize=False,
      add_generation_prompt=True,
      date_string=_LLAMA_DATE,
    )
    return text, tuple(self.encode(text))

  def token_texts(self) -> list[str]:
    """Returns what each id adds to a text when it is decoded after other ids.

    Vocabularies spell tokens in an alphabet of their own (byte-level BPE writes
    a space as "Ġ"), so the ids are decoded. Bytes that are only a part of a
    character give U+FFFD, and control tokens give "".
    """
    decode = functools.partial(
      self.hf.backend_tokenizer.decode_batch, skip_special_tokens=True
    )
    ids = range(self.vocab_size)
    alone = decode([[i] for i in ids])
    # Some decoders join tokens by a space or drop the one at the beginning of a
    # text, so each id is decoded behind an ordinary one.
    before = next(
      (i for i, t in enumerate(alone) if t.isascii() and t.isalnum()), None
    )
    if before is None:
      return alone
    start = len(alone[before])
    return [text[start:] for text in decode([[before, i] for i in ids])]


def _end_of_turn_ids(folder: pathlib.Path) -> list[int]:
  """`eos_token_id`, absent, one id or several: generation_config.json's, or
  config.json's where that file is silent."""
  for name in ("generation_config.json", "config.json"):
    path = folder / name
    if not path.is_file():
      continue
    value = json_files.read(path).get("eos_token_id")
    if value is None:
      continue
    ids = value if isinstance(value, list) else [value]
    if not all(type(i) is int and i >= 0 for i in ids):
      raise ValueError(
        f"{path}: eos_token_id is {value!r}, expected a token's id or a list "
        "of ids."
      )
    return ids
  return []
