"""A Hugging Face tokenizer with the methods that episodes need."""

from __future__ import annotations

import datetime
import functools
import json
import pathlib
import string
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from anysearch_jax.environment import protocol, wording
from anysearch_jax.host import json_files

if TYPE_CHECKING:
  import transformers

# Characters; encoding a longer text takes milliseconds.
_LONG = 8192
# Templates write today's date by this function. Prompts, and so runs, would
# change at midnight, so they get a fixed date: the one in Llama 3.1's template.
_CURRENT_DATE = "strftime_now"
_FIXED_DATE = datetime.datetime(2024, 7, 26)
_DATE_FLAGS = "-_0^#"  # Of strftime, such as the one in %-d.
# Gemma 3's placeholder of an image; its text models have no embedding for it.
_IMAGE = "<image_soft_token>"


class Tokenizer:
  """A `types.TextCodec` over a fast Hugging Face tokenizer.

  Sampled ids are never encoded again: `encode` is for prompts and texts of the
  environment, `decode` for the ids that the model sampled.

  Attributes:
    end_of_turn_ids: ids that end a turn (those of generation_config.json and
      the tokenizer's EOS).
    control_tokens: strings of all added tokens but the protocol's tags and
      white space. Questions and passages must not contain them.
    vocab_size: ids are below this number.
  """

  def __init__(
    self,
    hf: transformers.PreTrainedTokenizerBase,
    *,
    end_of_turn_ids: Sequence[int] = (),
  ):
    self.hf = hf
    # tokenizer.json may keep the limits of its last use. A prompt is never cut
    # or padded.
    hf.backend_tokenizer.no_truncation()
    hf.backend_tokenizer.no_padding()
    ids = {int(i) for i in end_of_turn_ids}
    if hf.eos_token_id is not None:
      ids.add(int(hf.eos_token_id))
    self.end_of_turn_ids = frozenset(ids)
    # The text of an added token becomes that token wherever it occurs. The
    # protocol's tags are excluded because they are neutralised separately.
    self.control_tokens = tuple(
      sorted(
        token.content
        for token in hf.added_tokens_decoder.values()
        if not protocol.TAG_PATTERN.fullmatch(token.content)
        and not token.content.isspace()
      )
    )
    self.vocab_size = len(hf)
    if hf.convert_ids_to_tokens(len(hf) - 1) == _IMAGE:
      self.vocab_size -= 1

  @classmethod
  def from_folder(cls, folder: str | pathlib.Path) -> Tokenizer:
    """Reads a Hugging Face folder.

    Raises:
      ValueError: the folder has no tokenizer, or a damaged one.
    """
    folder = pathlib.Path(folder)
    if not (folder / "tokenizer.json").is_file():
      raise ValueError(
        f"{folder}: no tokenizer.json; expected a Hugging Face folder with a "
        "fast tokenizer."
      )
    # Importing it takes a second, which most commands need not wait for.
    import transformers

    # AutoTokenizer would build a byte-level BPE from the vocabulary for a Qwen
    # config.json, whatever kind of tokenizer tokenizer.json describes.
    try:
      hf = transformers.PreTrainedTokenizerFast.from_pretrained(
        folder, local_files_only=True
      )
    # A damaged file can raise anything in the libraries, even bare Exceptions.
    except Exception as error:
      for path in sorted(folder.glob("*token*.json")):
        json_files.read(path)
      raise ValueError(
        f"{folder}: tokenizer.json and the files beside it are not a fast "
        f"tokenizer's ({type(error).__name__}: {error}); copy them again."
      ) from error
    return cls(hf, end_of_turn_ids=_end_of_turn_ids(folder))

  def encode(self, text: str) -> list[int]:
    """Returns the ids of plain text, without added special tokens."""
    backend = self.hf.backend_tokenizer
    if len(text) < _LONG:
      return backend.encode(text, add_special_tokens=False).ids
    # `encode_batch` releases the GIL, `encode` holds it.
    return backend.encode_batch([text], add_special_tokens=False)[0].ids

  def decode(self, ids: Sequence[int]) -> str:
    """Returns the text of ids, without control tokens."""
    return self.hf.backend_tokenizer.decode(list(ids), skip_special_tokens=True)

  @property
  def end_of_turn_id(self) -> int | None:
    """The tokenizer's EOS, which is one of the ids that end a turn."""
    end = self.hf.eos_token_id
    return None if end is None else int(end)

  def transcript(self, ids: Sequence[int]) -> str:
    """Returns the text of ids with control tokens, for servers that encode it.

    The BOS at its beginning is left out if the tokenizer writes one itself;
    the server's tokenizer does then too.
    """
    backend = self.hf.backend_tokenizer
    written_bos = backend.encode("").ids[:1]
    ids = list(ids)
    if written_bos and written_bos == ids[:1] == [self.hf.bos_token_id]:
      ids = ids[1:]
    return backend.decode(ids, skip_special_tokens=False)

  def render(
    self, content: str, system: str = "", prefill: str = "", chat: bool = True
  ) -> tuple[str, list[int]]:
    """Applies the chat template to one user message, with generation prompt.

    Without a template (a base model), or without `chat`, the raw texts are
    encoded, with the tokenizer's special tokens. The template writes BOS if the
    family has one.

    Args:
      content: the user's message.
      system: a system message before it; "" for none.
      prefill: the beginning of the answer, after the generation prompt.
      chat: whether to apply the template.

    Returns:
      The prompt, and its ids.
    """
    text, ids = self._rendered(content, system, prefill, chat)
    return text, list(ids)

  @functools.lru_cache(maxsize=4096)  # noqa: B019  (one tokenizer a process)
  def _rendered(
    self, content: str, system: str, prefill: str, chat: bool
  ) -> tuple[str, tuple[int, ...]]:
    """Renders a prompt; cached, because a group's samples share the prompt."""
    if self.hf.chat_template is None or not chat:
      text = wording.joined(content, system, prefill)
      return text, tuple(self.hf.backend_tokenizer.encode(text).ids)
    messages = [{"role": "user", "content": content}]
    if system:
      messages = [{"role": "system", "content": system}, *messages]
    text = self._templated(messages, "a system message and a user's")
    if prefill:
      # It is the beginning of the response, also if the template has another.
      text = text.removesuffix(protocol.opened_reasoning(text))
    text += prefill
    return text, tuple(self.encode(text))

  def render_messages(
    self,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] = (),
  ) -> str:
    """Applies the chat template to a conversation, with generation prompt.

    Without a template (a base model), the contents are joined without anything
    between them, and tools are left out.

    Args:
      messages: each with `role`, `content`, and what else the template reads.
      tools: the JSON schemas of the functions that the model may call.

    Raises:
      ValueError: the template takes no such conversation.
    """
    if self.hf.chat_template is None:
      return "".join(message["content"] for message in messages)
    return self._templated(messages, "such a conversation", tools)

  def encode_prompt(self, text: str) -> list[int]:
    """Returns the ids of a rendered prompt.

    Without a chat template, which writes them itself, the tokenizer adds its
    special tokens.
    """
    if self.hf.chat_template is None:
      return self.hf.backend_tokenizer.encode(text).ids
    return self.encode(text)

  def _templated(
    self,
    messages: Sequence[Mapping[str, Any]],
    expected: str,
    tools: Sequence[Mapping[str, Any]] = (),
  ) -> str:
    """Returns a conversation in the chat template, with generation prompt.

    Args:
      messages: the conversation.
      expected: what the template must take, for the error's sentence.
      tools: the JSON schemas of functions.
    """
    macro = ""
    try:
      template = self.hf.get_chat_template()
      if _CURRENT_DATE in template:
        macro = _fixed_date_macro()
      text = self.hf.apply_chat_template(
        list(messages),
        tools=list(tools) or None,
        chat_template=macro + template,
        add_generation_prompt=True,
        tokenize=False,
      )
    # The expressions of a template can raise anything.
    except Exception as error:
      line = getattr(error, "lineno", None)
      place = f" in line {line - macro.count(chr(10))}" if line else ""
      raise ValueError(
        f"{self.hf.name_or_path}: the chat template cannot be rendered"
        f"{place} ({type(error).__name__}: {error}); expected one that takes "
        f"{expected}; mend chat_template.jinja, or `chat_template` in "
        "tokenizer_config.json."
      ) from error
    assert isinstance(text, str)  # One conversation, not tokenized.
    return text

  def token_texts(self) -> list[str]:
    """Returns the text that each id adds when it is decoded after other ids.

    The strings in a vocabulary are encoded (byte-level BPE writes a space as
    "Ġ"), so the ids are decoded. Bytes that are only part of a character give
    U+FFFD, and control tokens give "".
    """
    decode = functools.partial(
      self.hf.backend_tokenizer.decode_batch, skip_special_tokens=True
    )
    ids = range(self.vocab_size)
    texts = decode([[i] for i in ids])
    # Some decoders join tokens by spaces or drop a space at the beginning of a
    # text, so each id is decoded after an ordinary one.
    ordinary = next(
      (i for i, t in enumerate(texts) if t.isascii() and t.isalnum()), None
    )
    if ordinary is None:
      return texts
    start = len(texts[ordinary])
    return [text[start:] for text in decode([[ordinary, i] for i in ids])]


@functools.cache
def _fixed_date_macro() -> str:
  """Returns a macro of Jinja that a template calls in place of `strftime_now`.

  transformers hands no functions to a template, so the macro replaces the
  directives of a format, such as `%d` and `%-d`, by their texts. It is a line
  of its own, so that the template still begins where a line does.
  """
  directives = [
    f"%{flag}{letter}"
    for flag in ("", *_DATE_FLAGS)
    for letter in string.ascii_letters
  ]
  texts = {name: _FIXED_DATE.strftime(name) for name in directives}
  return (
    f"{{%- macro {_CURRENT_DATE}(format) -%}}"
    "{%- set date = namespace(text=format.replace('%%', '\\0')) -%}"
    f"{{%- for name, text in {json.dumps(texts)}.items() -%}}"
    "{%- set date.text = date.text.replace(name, text) -%}"
    "{%- endfor -%}"
    "{{- date.text.replace('\\0', '%') -}}"
    "{%- endmacro %}\n"
  )


def _end_of_turn_ids(folder: pathlib.Path) -> list[int]:
  """Returns the values of `eos_token_id`, which may be missing or a list.

  generation_config.json takes precedence over config.json.
  """
  for name in ("generation_config.json", "config.json"):
    path = folder / name
    values = json_files.read(path) if path.is_file() else {}
    if (value := values.get("eos_token_id")) is None:
      continue
    ids = value if isinstance(value, list) else [value]
    if not all(type(i) is int and i >= 0 for i in ids):
      raise ValueError(
        f"{path}: eos_token_id is {value!r}, expected a token's id or a list "
        "of ids."
      )
    return ids
  return []
