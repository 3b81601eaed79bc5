"""The formats of published question files: turns rows into `RawQuestion`s.

Cells hold a list as a list or as printed text, and the tools that wrote them
damaged some values, which are repaired. Otherwise reading corrects nothing:
`clean`, `as_question` and `accepted_answers` make lines of readable text for
all formats alike, and `question_key` compares questions.
"""

from __future__ import annotations

import ast
import json
import math
import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from anysearch_jax.data import evidence as evidence_lib
from anysearch_jax.environment import official_scoring, scoring
from anysearch_jax.host import json_files, listing

Row = Mapping[str, Any]
ANSWER_SPLIT = "<|answer_split|>"

# An item in the text of a list. NumPy prints no commas between items, and
# Python would concatenate adjacent strings, so items are parsed one at a time.
_ITEM = re.compile(
  r"'(?:[^'\\]|\\.)*'" r'|"(?:[^"\\]|\\.)*"' r"|-?\d+(?:\.\d+)?", re.DOTALL
)
_MISSING = frozenset(("nan", "none", "null"))
# Prefixes of lists and objects that a program printed as text.
_NOT_TEXT = ("{'", '{"', "array([", "['", '["')
# Quotation marks and minus signs that are not punctuation in Unicode.
_ASCII = str.maketrans({**dict.fromkeys("´ʹʻʼʽ˴", "'"), "−": "-", "﹣": "-"})
_ACCENTS = re.compile("[\u0300-\u036f]")
_ARTICLES = re.compile(r"\b(a|an|the)\b")
# Characters: ten times the longest question of the known datasets. A longer
# text is a document in the wrong column.
LONGEST = 10_000
# Control characters that are not white space.
_CONTROLS = re.compile("[\x01-\x08\x0e-\x1b\x7f]")

_MARK = "Question:"
_HOPS = re.compile(r"([1-9])hop")
# Columns of evidence, which some files store as JSON text.
_NESTED = frozenset(
  (
    "context",
    "evidence_doc_ids",
    "evidences",
    "gold_doc_ids",
    "paragraphs",
    "question_decomposition",
    "search_keys",
    "supporting_facts",
  )
)
_CAPITAL = re.compile("(?<=[a-z])(?=[A-Z])")
# Columns that are not copied to the metadata: those with a field in
# `RawQuestion`, those without a later use, and `facts`, in which reports expect
# the chain of a question of the generated world.
_NOT_METADATA = frozenset(
  (
    "_id",
    "ability",
    "answer",
    "Answer",
    "answer_aliases",
    "answerable",
    "answers",
    "canary",
    "data_source",
    "dataset",
    "facts",
    "golden_answers",
    "hops",
    "id",
    "index",
    "n_hops",
    "possible_answers",
    "prompt",
    "question",
    "Question",
    "question_id",
    "QuestionId",
    "split",
    "sub_questions",
    "supporting",
    official_scoring.ANSWERS,
  )
)


class DataError(ValueError):
  """A file, folder or setting cannot be used; the message says what to do."""


class MalformedError(ValueError):
  """A row is not a question. Rows are counted by the message: keep it short."""


class RawQuestion(NamedTuple):
  """A question as its file has it.

  Attributes:
    question: the question's text.
    answers: the accepted answers, not cleaned.
    id, dataset, split: "" if the row does not have it.
    hops: number of consecutive searches that the answer takes; None if unknown.
    metadata: the row's plain values and its evidence: `gold_doc_ids`,
      `evidence_doc_ids`, `supporting` (title, and text if the row has it),
      `sub_questions` (MuSiQue), `search_keys` (StepSearch); and
      `official_answers`, if the dataset's own script accepts other answers.
    verbatim: whether the question is asked as it is, and not rewritten by
      `as_question`.
  """

  question: str
  answers: tuple[str, ...]
  id: str = ""
  dataset: str = ""
  split: str = ""
  hops: int | None = None
  metadata: Mapping[str, Any] = {}
  verbatim: bool = False


def recognize(row: Row) -> str | None:
  """Returns the format of a file, from its first row; None if unknown."""
  for name, (columns, _) in FORMATS.items():
    if columns <= row.keys():
      return name
  return None


def read(row: Row, format: str) -> RawQuestion:
  """Reads a row of a format.

  Raises:
    MalformedError: the row does not have this format.
  """
  columns, reader = FORMATS[format]
  if lacking := sorted(columns - row.keys()):
    raise MalformedError(f"no {', '.join(lacking)}")
  return reader(row)


def _flashrag(row: Row) -> RawQuestion:
  return _raw_question(row, row["golden_answers"], mapping(row, "metadata"))


def _search_r1(row: Row) -> RawQuestion:
  truth = mapping(row, "reward_model").get("ground_truth")
  extra = mapping(row, "extra_info")
  values = {**mapping(row, "metadata"), "dataset": row.get("data_source")}
  if isinstance(truth, Mapping):
    values["search_keys"] = truth.get("search_keys")
    truth = truth.get("target")
  values["split"] = extra.get("split") or values.get("split")
  values["index"] = extra.get("index")
  values["paragraphs"] = extra.get("support_docs")
  if not row.get("question"):
    row = {**row, "question": _question_of_prompt(row.get("prompt"))}
  return _raw_question(row, truth, values)


def _anysearch(row: Row) -> RawQuestion:
  target = mapping(row, "label").get("target")
  return _raw_question(row, target, mapping(row, "metadata"))


def _popqa(row: Row) -> RawQuestion:
  return _raw_question(row, parsed(row["possible_answers"], list), row)


def _triviaqa(row: Row) -> RawQuestion:
  # The hub's copy writes NormalizedAliases as normalized_aliases.
  answer = {
    _CAPITAL.sub("_", name).lower(): value
    for name, value in mapping(row, "Answer").items()
  }
  question = {"id": row.get("QuestionId"), "question": row["Question"]}
  return _with_aliases(question, answer, row)


def _with_aliases(question: Row, answer: Row, values: Row) -> RawQuestion:
  """Reads TriviaQA's answer; the arguments are those of `_raw_question`."""
  normalized = listed(answer, "normalized_aliases")
  accepted = [answer.get("value"), *listed(answer, "aliases"), *normalized]
  texts = [text for text in accepted if text is not None]
  raw = _raw_question(question, texts, values)
  official = answers([*normalized, *listed(answer, "human_answers")])
  return raw._replace(
    metadata={**raw.metadata, official_scoring.ANSWERS: list(official)}
  )


def _musique(row: Row) -> RawQuestion:
  accepted = [row["answer"], *listed(row, "answer_aliases")]
  if row.get("answerable") is False:
    # Half of MuSiQue-Full is unanswerable; such a row repeats the answers of
    # its answerable twin.
    accepted = []
  return _raw_question(row, [x for x in accepted if x is not None], row)


def _plain(row: Row) -> RawQuestion:
  written = row["answer"] if "answer" in row else row["answers"]
  answer = nested(written)
  if not isinstance(answer, Mapping):
    return _raw_question(row, written, row)
  if "aliases" in answer and "value" in answer:
    return _with_aliases(row, answer, row)
  if "text" not in answer:
    raise MalformedError(
      f"an answer that is a dict of {listing.first_names(answer)}; expected "
      "text, TriviaQA's value and aliases, or SQuAD's text"
    )
  return _raw_question(row, answer["text"], row)


def _bamboogle(row: Row) -> RawQuestion:
  row = {name.lower(): value for name, value in row.items() if name}
  return _raw_question(row, row["answer"], row)


def _browsecomp_plus(row: Row) -> RawQuestion:
  try:
    values = evidence_lib.decrypted(row)
  except (ValueError, KeyError, TypeError) as error:
    raise MalformedError(
      "a text that no canary, or a wrong one, decrypts; expected --canary=TEXT "
      "of anysearch prepare_data, the DEFAULT_CANARY of decrypt_dataset.py"
    ) from error
  question = {"id": row["query_id"], "question": values.pop("query")}
  raw = _raw_question(question, [values.pop("answer")], values)
  return raw._replace(verbatim=True)


def _frames(row: Row) -> RawQuestion:
  # Pandas has written the number of a row, in a column without a name.
  question = {
    "id": row.get("", row.get("Unnamed: 0")),
    "question": row["Prompt"],
  }
  values = {
    "reasoning_types": row.get("reasoning_types"),
    "supporting_facts": [
      [title, 0] for title in evidence_lib.linked_articles(row)
    ],
  }
  return _raw_question(question, [row["Answer"]], values)._replace(
    verbatim=True
  )


# The first format whose columns are all present is chosen (docs/data.md says
# which files have them). Order matters: Search-R1's files also have FlashRAG's
# columns, and most files have a question and an answer.
FORMATS: dict[str, tuple[frozenset[str], Callable[[Row], RawQuestion]]] = {
  name: (frozenset(columns.split()), reader)
  for name, columns, reader in (
    ("search_r1", "reward_model", _search_r1),
    ("anysearch", "question label", _anysearch),
    ("flashrag", "question golden_answers", _flashrag),
    ("popqa", "question possible_answers", _popqa),
    ("triviaqa", "Question Answer QuestionId", _triviaqa),
    ("musique", "question answer paragraphs", _musique),
    ("hotpotqa", "question answer supporting_facts", _plain),
    ("browsecomp_plus", "query gold_docs evidence_docs", _browsecomp_plus),
    ("frames", "Prompt Answer wiki_links", _frames),
    ("bamboogle", "Question Answer", _bamboogle),
    ("plain", "question answer", _plain),
    ("answers", "question answers", _plain),
  )
}


def _raw_question(row: Row, accepted: Any, values: Row) -> RawQuestion:
  """Assembles a question from the columns that all formats share.

  Args:
    row: has the question, and maybe the id.
    accepted: the accepted answers, as `answers` reads them.
    values: has the other columns.
  """
  question = row["question"]
  if not isinstance(question, str):
    raise MalformedError("no question")
  values = {
    name: nested(value) if name in _NESTED else value
    for name, value in values.items()
  }
  split = str(values.get("split") or "")
  id_ = row.get("id", row.get("_id", row.get("question_id")))
  if id_ is None and values.get("index") is not None:
    id_ = f"{split}_{values['index']}".lstrip("_")
  if id_ is not None and (isinstance(id_, bool) or not plain(id_)):
    raise MalformedError(f"an id that is a {type(id_).__name__}")
  id_ = "" if id_ is None else str(id_)
  metadata = {
    name: value
    for name, value in values.items()
    if name not in _NOT_METADATA and value != "" and plain(value)
  }
  evidence = _evidence(values)
  hops = values.get("n_hops", values.get("hops"))
  if isinstance(hops, float):
    # Pandas turns integer columns with missing values into floats.
    hops = None if math.isnan(hops) else hops
    hops = int(hops) if hops is not None and hops.is_integer() else hops
  if hops is None:
    hops_in_id = _HOPS.match(id_)
    titles = {s.get("title") for s in evidence.get("supporting", ())}
    steps = evidence.get("sub_questions") or titles
    hops = int(hops_in_id[1]) if hops_in_id else len(steps) or None
  if hops is not None and (type(hops) is not int or not 0 <= hops < 100):
    raise MalformedError("hops that are no small number")
  return RawQuestion(
    question,
    answers(accepted),
    id=id_,
    dataset=str(values.get("dataset") or ""),
    split=split,
    hops=hops,
    metadata=metadata | evidence,
  )


def _evidence(values: Row) -> dict[str, Any]:
  """Returns the passages and steps to the answer that a row records."""
  metadata: dict[str, Any] = {}
  for name in ("gold_doc_ids", "evidence_doc_ids"):
    if ids := listed(values, name):
      metadata[name] = list(map(str, ids))
  if supporting := _supporting(values):
    metadata["supporting"] = supporting
  steps = dicts(values, "question_decomposition")
  if steps:
    metadata["sub_questions"] = [
      {name: text(step[name]) for name in ("question", "answer")}
      for step in steps
      if step.get("question") is not None and step.get("answer") is not None
    ]
  if keys := listed(values, "search_keys"):
    metadata["search_keys"] = [list(answers(key)) for key in keys]
  return metadata


def _supporting(values: Row) -> list[dict[str, str]]:
  """Returns supporting passages in order: titles, and texts if present."""
  facts = values.get("supporting_facts")
  if isinstance(facts, Mapping):
    titles = listed(facts, "title")
  else:
    titles = [
      fact[0] if isinstance(fact, list | tuple) and fact else None
      for fact in listed(values, "supporting_facts")
    ]
  if titles:
    if not all(isinstance(title, str) for title in titles):
      raise MalformedError("supporting facts without titles")
    texts = _context(values)
    return [
      {"title": title, **({"text": texts[title]} if title in texts else {})}
      for title in dict.fromkeys(titles)
    ]
  paragraphs = dicts(values, "paragraphs")
  if not paragraphs:
    # FlashRAG's MuSiQue has one in each step, and no others.
    for step in dicts(values, "question_decomposition"):
      paragraph = step.get("support_paragraph")
      if isinstance(paragraph, Mapping) and paragraph not in paragraphs:
        paragraphs.append(paragraph)
  return [
    {
      "title": str(paragraph.get("title") or ""),
      "text": str(paragraph.get("paragraph_text") or ""),
    }
    for paragraph in paragraphs
    # StepSearch's rows list supporting passages only, without the key.
    if paragraph.get("is_supporting", True)
  ]


def _context(values: Row) -> dict[str, str]:
  """Returns the passages of HotpotQA and 2WikiMultihopQA, by title.

  If a title occurs twice, the first passage is kept. A passage is a list of
  sentences: [title, sentences] in the datasets' own files, columns of titles
  and of sentences elsewhere. Other contexts give no passages.
  """
  context = values.get("context")
  pairs: Iterable[Sequence[Any]]
  if isinstance(context, Mapping):
    sentences = "sentences" if "sentences" in context else "content"
    pairs = zip(listed(context, "title"), listed(context, sentences))
  elif isinstance(context, list | tuple):
    pairs = (p for p in context if isinstance(p, list | tuple) and len(p) == 2)
  elif isinstance(context, str) and context.startswith(("[", "{")):
    raise MalformedError("a context that is no JSON list")
  else:
    return {}
  texts: dict[str, str] = {}
  for title, sentences_of_title in pairs:
    if isinstance(title, str) and isinstance(sentences_of_title, list | tuple):
      # 2WikiMultihopQA has no spaces between sentences.
      text = " ".join(" ".join(map(str, sentences_of_title)).split())
      texts.setdefault(title, text)
  return texts


def _question_of_prompt(prompt: Any) -> str:
  """Extracts the question from a prompt."""
  content = prompt
  if not isinstance(prompt, str):
    user_messages = [
      message.get("content")
      for message in dicts({"prompt": prompt}, "prompt")
      if message.get("role", "user") == "user"
    ]
    content = user_messages[-1] if user_messages else None
  if not isinstance(content, str):
    raise MalformedError("neither a question nor a prompt")
  _, mark, question = content.rpartition(_MARK)
  if not mark and "\n" in content.strip():
    raise MalformedError(f"a prompt without {_MARK!r}")
  return question


def as_question(text: str) -> str:
  """Returns a question as the policy reads it: one line that ends in `?`."""
  text = line(text)
  inner = text[1:-1]
  # Some TriviaQA questions are raw CSV cells, with doubled quotes inside.
  if text[:1] == text[-1:] == '"' and '""' in inner:
    if '"' not in inner.replace('""', ""):
      text = line(inner.replace('""', '"'))
  return text if text.endswith("?") else f"{text}?"


def accepted_answers(answers: Iterable[str]) -> tuple[str, ...]:
  """Returns distinct answers in order, without those that normalise to ""."""
  return tuple(
    a for a in distinct_answers(answers) if scoring.normalize_answer(a)
  )


def distinct_answers(answers: Iterable[str]) -> tuple[str, ...]:
  """Returns distinct answers in order, without empty ones."""
  return tuple(dict.fromkeys(a for a in map(line, answers) if a))


def clean(
  raw: RawQuestion, aliases: Mapping[str, Sequence[str]]
) -> RawQuestion:
  """Removes control characters and adds the answers of the dataset's script.

  Args:
    raw: a question as its file has it.
    aliases: by `answer_id`, names that the dataset's script also accepts.

  Raises:
    MalformedError: a text is unreadable, or the question is empty.
  """
  question = _readable(raw.question, "a question")
  answers = tuple(_readable(a, "an answer") for a in raw.answers)
  id_ = _readable(raw.id, "an id")
  if not question_key(question):
    raise MalformedError("an empty question")
  metadata = raw.metadata
  if names := aliases.get(metadata.get("answer_id", "")):
    accepted = dict.fromkeys((*answers, *names))
    metadata = {**metadata, official_scoring.ANSWERS: list(accepted)}
  return raw._replace(
    question=question, answers=answers, id=id_, metadata=metadata
  )


def line(text: str) -> str:
  """Returns a text in one line, with single spaces."""
  return " ".join(without_surrogates(text).split())


def without_surrogates(text: str) -> str:
  """Replaces unpaired surrogates: JSON can hold them, UTF-8 cannot."""
  try:
    text.encode()  # Nearly all texts; it is the faster one.
  except UnicodeEncodeError:
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
  return text


def _readable(text: str, noun: str) -> str:
  """Returns a text without control characters; errors call it `noun`."""
  # NUL indicates that the file was decoded with a wrong encoding.
  if "\0" in text:
    raise MalformedError(f"{noun} with the character NUL")
  if len(text) > LONGEST:
    raise MalformedError(f"{noun} of more than {LONGEST} characters")
  return _CONTROLS.sub(" ", text)


def question_key(question: str) -> str:
  """Returns a key that is equal for questions that differ only in spelling.

  The key ignores case, punctuation, articles, white space, accents and
  compatibility forms of characters: `Beyoncé’s “Halo” – who?` becomes
  `beyonceshalowho`. It is used for comparison only; stored questions keep
  their text.
  """
  text = unicodedata.normalize("NFKC", question.translate(_ASCII))
  text = scoring.normalize_answer(text).casefold()
  # Neither punctuation nor invisible characters, such as a soft hyphen.
  text = "".join(
    character
    for character in text
    if (kind := unicodedata.category(character)) != "Cf" and kind[0] != "P"
  )
  text = unicodedata.normalize("NFKD", _ARTICLES.sub(" ", text))
  # White space is removed, so that "well-known" equals "well known".
  return "".join(_ACCENTS.sub("", text).split())


def answers(value: Any) -> tuple[str, ...]:
  """Reads accepted answers from a list, a string or joined strings.

  Raises:
    MalformedError: the value has another type, or is the text of a damaged
      list.
  """
  if value is None:
    return ()
  is_scalar = not isinstance(value, list | tuple)
  texts: list[str] = []
  for item in [value] if is_scalar else value:
    for part in text(item).split(ANSWER_SPLIT):
      # Inside a list, text in brackets but without quotes is an answer itself.
      items = _items(part) if is_scalar or set(part) & {"'", '"'} else None
      if items is not None:
        texts += map(text, items)
      elif is_scalar and part.lstrip().startswith(_NOT_TEXT):
        raise MalformedError("an answer that is the text of a list or object")
      else:
        texts.append(part)
  return tuple(texts)


def mapping(row: Row, name: str) -> Row:
  """Returns a column of named values; some files store it as JSON text."""
  value = row.get(name)
  if value is None or value == "":
    return {}
  value = nested(value)
  if not isinstance(value, Mapping):
    raise MalformedError(f"{name} that is a {type(value).__name__}")
  return value


def nested(value: Any) -> Any:
  """Returns a value, parsed if it is the JSON text of an object or a list."""
  if not isinstance(value, str) or value.lstrip()[:1] not in ("{", "["):
    return value
  try:
    return json_files.parse(value)
  except (ValueError, RecursionError):
    return value


def parsed(text: Any, kind: type) -> Any:
  """Parses JSON text; raises MalformedError if the value is not a `kind`."""
  try:
    value = json_files.parse(text)
  except (ValueError, TypeError, RecursionError):
    value = None
  if not isinstance(value, kind):
    raise MalformedError(f"text that is no JSON {kind.__name__}")
  return value


def listed(row: Row, name: str) -> list[Any]:
  """Returns a column of lists, also as JSON text; [] if it is missing."""
  value = nested(row.get(name))
  if value is None or value == "":
    return []
  if not isinstance(value, list | tuple):
    raise MalformedError(f"{name} that is a {type(value).__name__}")
  return list(value)


def dicts(row: Row, name: str) -> list[Row]:
  """Returns a column of lists of objects; [] if it is missing."""
  columns = nested(row.get(name))
  if isinstance(columns, Mapping):  # As the hub's library stores sequences.
    lists = [listed(columns, column) for column in columns]
    if len(set(map(len, lists))) > 1:
      raise MalformedError(f"{name} that holds lists of different lengths")
    return [dict(zip(columns, cells)) for cells in zip(*lists)]
  value = listed(row, name)
  if not all(isinstance(item, Mapping) for item in value):
    raise MalformedError(f"{name} that holds something else than objects")
  return value


def plain(value: Any) -> bool:
  """Returns whether a value is a string, a finite number or a boolean."""
  if isinstance(value, float):
    return math.isfinite(value)
  return isinstance(value, str | int | bool)


def text(value: Any) -> str:
  """Returns an answer as text; it may be a string or a finite number."""
  if isinstance(value, str):
    return value
  # Some files store years and counts as numbers; a boolean is an error.
  if isinstance(value, bool) or not isinstance(value, int | float):
    raise MalformedError(f"an answer that is a {type(value).__name__}")
  if not math.isfinite(value):
    raise MalformedError(f"an answer that is {value}")
  # Pandas writes 1912.0 if other rows have no year; the normalisation of
  # answers would turn that into 19120.
  return str(int(value) if value == int(value) else value)


def _items(written: str) -> Sequence[Any] | None:
  """Returns the items in the text of a list; None if it is not a list."""
  written = written.strip()
  if not (written.startswith("[") and written.endswith("]")):
    return None
  try:
    value = json.loads(written)
  except (ValueError, RecursionError):
    value = None
  if isinstance(value, list):
    return value
  inside = written[1:-1]
  between = set(_ITEM.sub(" ", inside).replace(",", " ").lower().split())
  if between - _MISSING:
    return None
  if between:
    raise MalformedError("an answer that is missing in the text of a list")
  try:
    return [ast.literal_eval(item) for item in _ITEM.findall(inside)]
  except (ValueError, SyntaxError):
    return None
