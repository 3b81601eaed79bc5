r"""Builds an index over documents, or over a corpus of passages.

    anysearch build_index --documents=notes,'papers/**/*.pdf' \
        --output=indexes/mine --update
    anysearch build_index --corpus=wiki-18.jsonl.gz --output=indexes/bm25
    anysearch build_index --corpus=wiki-18.jsonl.gz --kind=flat \
        --encoder=models/e5-base-v2 --output=indexes/e5

Documents are files, folders and globs: Markdown, text, HTML, CSV, JSON, JSON
lines, Parquet, PDF and DOCX. They are split into passages. `--update` reads
only what changed. Files that cannot be read are listed.

Kinds: `bm25`; `flat`, exact search over the vectors of an encoder, on a CPU or
on accelerators; `faiss_file`, an existing index (for example Search-R1's
e5_Flat.index), named by --faiss_file together with the encoder that made it;
`milvus`, a collection at --address (docs/data.md), beside which --output has
the line offsets of the corpus.
A corpus is JSON lines (plain or gzip), a Parquet file or a folder of those, of
`id` and `contents` (Search-R1's format), or of `id`, `title` and `text`.

If the command is stopped, running it again resumes. Several GPUs or hosts that
share the output folder can build together: each runs the command with
--processes=N --process=I. The last process to finish completes the index; if
none did, run any one of them again.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Callable
from typing import Any

from absl import flags

from anysearch_jax.launch import documents, jax_setup, progress
from anysearch_jax.launch import flags as launch_flags


def define_flags() -> None:
  flags.DEFINE_string(
    "corpus",
    None,
    "Corpus of passages: JSON lines (plain or gzip), Parquet, or a folder of "
    "these; or give --documents.",
  )
  flags.DEFINE_list(
    "documents",
    [],
    "Files, folders and globs to split into passages; or give --corpus.",
  )
  documents.define_reading()
  flags.DEFINE_bool(
    "update",
    False,
    "With --documents: read only files that changed since the index was made.",
  )
  flags.DEFINE_integer(
    "passage", 200, "With --documents: limit on the tokens of a passage.", 16
  )
  flags.DEFINE_integer(
    "overlap",
    30,
    "With --documents: tokens that a passage repeats of the one before it.",
    0,
  )
  flags.DEFINE_string("output", None, "Folder of the index.", required=True)
  flags.DEFINE_enum(
    "kind",
    "bm25",
    ["bm25", "flat", "hybrid", "faiss_file", "milvus"],
    "bm25: words; flat: exact search over an encoder's vectors; hybrid: both, "
    "fused; faiss_file: an index that FAISS wrote; milvus: a collection at "
    "--address.",
  )
  flags.DEFINE_string(
    "encoder",
    None,
    "Hugging Face folder of the encoder of passages and queries.",
  )
  flags.DEFINE_enum(
    "pooling",
    None,
    ["mean", "cls", "lasttoken"],
    "How the encoder makes one vector of its tokens; default: as its folder "
    "says.",
  )
  flags.DEFINE_string(
    "query_prefix",
    None,
    "Text that the encoder reads before each query; default: as its folder "
    "says.",
  )
  flags.DEFINE_string(
    "passage_prefix",
    None,
    "Text that the encoder reads before each passage; default: as its folder "
    "says.",
  )
  flags.DEFINE_integer(
    "max_tokens",
    None,
    "Limit on the tokens that the encoder reads of a text; default: as its "
    "folder says.",
    1,
  )
  flags.DEFINE_enum(
    "encoder_dtype",
    None,
    ["float32", "bfloat16"],
    "Type of the encoder's weights; default: bfloat16 on accelerators, float32 "
    "on CPUs.",
  )
  flags.DEFINE_string(
    "dtype",
    "float32",
    "Type of flat's vectors: float32, or bfloat16 for half the memory.",
  )
  flags.DEFINE_string(
    "faiss_file",
    "",
    "With kind faiss_file: the index, whose ids are rows of --corpus.",
  )
  flags.DEFINE_integer(
    "search",
    0,
    "With kind faiss_file: inverted lists (nprobe) or candidates (efSearch) "
    "that a search reads; more find more and take longer. 0: 64 lists or 256 "
    "candidates.",
    0,
  )
  flags.DEFINE_string(
    "vectors",
    "",
    "With kind flat: the file of an IndexFlatIP that has the vectors of all "
    "passages (research/tevatron_vectors.py writes one from Tevatron's "
    "pickles); default: the encoder makes them.",
  )
  flags.DEFINE_string(
    "language",
    "english",
    "Language of the words of bm25: one of Snowball's, such as german; any: "
    "words as they are and pairs of Chinese, Japanese or Korean characters; "
    "plain: runs of letters. With --documents, the default is the languages of "
    "the passages.",
  )
  flags.DEFINE_integer(
    "shard",
    65536,
    "Passages of a shard; a stopped command begins its last shard again.",
    1,
  )
  flags.DEFINE_bool(
    "skip_malformed",
    False,
    "Drop lines that are no passage; without it they are an error.",
  )
  flags.DEFINE_string(
    "address",
    "",
    "With kind milvus: address of a server, or path of a file.db.",
  )
  flags.DEFINE_string(
    "collection", "passages", "With kind milvus: name of the collection."
  )
  flags.DEFINE_string(
    "graph",
    "",
    "With kind milvus: the index of the vectors, such as hnsw; default: flat.",
  )
  flags.DEFINE_list(
    "fields",
    [],
    "With kind milvus: fields of the rows that are stored for filters.",
  )
  flags.DEFINE_string(
    "key_variable",
    None,
    "With kind milvus: environment variable with the key; default: no key.",
  )
  flags.DEFINE_list(
    "questions",
    [],
    "Files of questions with metadata.gold_doc_ids (FlashRAG's, or Parquet of "
    "anysearch prepare_data), whose recall is printed.",
  )
  flags.DEFINE_integer(
    "topk", 3, "With --questions: passages that a search returns.", 1
  )
  flags.DEFINE_integer(
    "process", 0, "Number of this process, from 0 to --processes - 1.", 0
  )
  flags.DEFINE_integer(
    "processes",
    1,
    "Processes that build the index together; each takes a part of the shards.",
    1,
  )
  launch_flags.define_devices()
  launch_flags.define_process()


def main(argv) -> None:
  f = flags.FLAGS
  jax_setup.configure(threads=f.threads, cache=f.cache, devices=f.devices)
  from anysearch_jax.host import platforms
  from anysearch_jax.retrieval import passages
  from anysearch_jax.retrieval.index import building, opening

  if bool(f.corpus) == bool(f.documents):
    raise ValueError(
      "found both or neither of --corpus and --documents, expected "
      "--documents=PATH (a file, a folder or a glob) or --corpus=FILE.jsonl."
    )
  names = [field.name for field in dataclasses.fields(building.Settings)]
  settings: dict[str, Any] = {name: f[name].value for name in names}
  lines: dict[str, progress.Line] = {}

  def report_progress(unit: str, done: int, total: int) -> None:
    line = lines.setdefault(unit, progress.Line(max(total, 1), unit=unit))
    line.tick(done)

  documents.require_paths()
  for path in (f.corpus, *f.questions):
    if path and not pathlib.Path(path).exists():
      raise ValueError(f"{path}: found no file, expected one to read.")
  encoder = _encoder(f)
  if f.documents:
    _documents(f, encoder, report_progress)
    return
  corpus = pathlib.Path(f.corpus)
  size = corpus.stat().st_size if corpus.is_file() else 0
  if f.kind == "milvus":
    prepared = passages.prepare(
      f.corpus, f.output, skip_malformed=f.skip_malformed
    )
    _fill(f, prepared, encoder, report_progress)
    return
  finished = building.build(
    f.corpus,
    f.output,
    building.Settings(**settings),
    encoder=encoder,
    process=f.process,
    processes=f.processes,
    on_bytes=lambda done: report_progress("MB read", done >> 20, size >> 20),
    on_rows=functools.partial(report_progress, "passage"),
    on_plan=print,
  )
  if not finished:
    print("other processes still encode; the last one ends the work")
    return
  index = opening.open_index(
    f.output, encoder=encoder, devices=platforms.accelerators()
  )
  identity = index.identity
  _print_repeated(index.corpus)
  print(
    f"{f.output}: {identity['kind']} over {len(index)} passages, identity "
    f"{identity['sha256'][:12]}"
  )
  if how := identity.get("search"):
    print(f"searched with {how['parameter']}={how['value']}")
  _print_recall(f, index)
  if encoder is not None and encoder.cut:
    print(
      f"found {encoder.cut} texts that are longer than the "
      f"{encoder.settings.max_tokens} tokens that the encoder reads; no search "
      "finds what follows. Split them, or use --documents, which does."
    )


def _fill(
  f: flags.FlagValues,
  corpus: Any,
  encoder: Any,
  report_progress: Callable[..., None],
) -> None:
  """Fills a collection of Milvus and prints its size."""
  if not f.address:
    raise ValueError("--address: expected where Milvus is.")
  from anysearch_jax.launch import retrievers

  collection = retrievers.open_collection(
    f.address, f.collection, f.key_variable or ""
  )
  from anysearch_jax.retrieval import milvus

  milvus.build(
    collection,
    corpus,
    encoder=encoder,
    language=f.language,
    vectors=f.graph or "flat",
    fields=f.fields,
    on_rows=functools.partial(report_progress, "passage"),
  )
  collection.client.close()
  _print_repeated(corpus)
  print(f"milvus: {f.collection} of {len(corpus)} passages")


def _print_repeated(corpus: Any) -> None:
  """Says how many passages of a corpus have the id of an earlier one."""
  if count := corpus.info.get("repeated_ids"):
    print(
      f"{count:,} of {len(corpus):,} passages have the id of an earlier one; "
      "an answer leaves out those with the same text and writes the others as "
      "ID#2. Give each passage an id of its own."
    )


def _documents(
  f: flags.FlagValues,
  encoder: Any,
  report_progress: Callable[[str, int, int], None],
) -> None:
  """Makes or updates the index of documents and prints what is in it."""
  from anysearch_jax.retrieval.documents import folder

  kinds = ("bm25",) if encoder is None else ("flat", "hybrid")
  if f.kind not in kinds:
    raise ValueError(
      f"found kind {f.kind} for documents, expected bm25, or flat or hybrid "
      "with --encoder=FOLDER."
    )
  language = f.language if f["language"].present else ""
  summary = folder.update(
    f.documents,
    f.output,
    folder.Settings(
      tokens=f.passage,
      overlap=f.overlap,
      language=language,
      ocr=f.ocr,
      follow_links=f.follow_links,
      ignored_files=f.ignored_files,
      kind=f.kind,
    ),
    encoder=encoder,
    afresh=not f.update,
    on_file=functools.partial(report_progress, "file"),
    on_rows=functools.partial(report_progress, "passage"),
  )
  max_listed = max(len(summary.skipped), len(summary.partly_read))
  for line in documents.summary_lines(summary, f.output, max_listed):
    print(line)
  if f.questions:
    from anysearch_jax.retrieval.index import opening

    _print_recall(f, opening.open_index(f.output, encoder=encoder))


def _print_recall(f: flags.FlagValues, index: Any) -> None:
  """Prints a line for each file of --questions."""
  for path in f.questions:
    print(_recall(index, path, k=f.topk))


def _recall(index: Any, path: str, *, k: int) -> str:
  """Returns a line with the recall of a file of questions.

  It has the shares of questions with any, and with all, of their gold passages
  among the first k.
  """
  from anysearch_jax.data import files, formats

  questions = []
  for number, row in files.rows(pathlib.Path(path)):
    try:
      if isinstance(row, formats.MalformedError):
        raise row
      metadata = formats.mapping(row, "metadata")
      gold = formats.listed(metadata, "gold_doc_ids")
      questions.append((row["question"], frozenset(map(str, gold))))
    except (formats.MalformedError, KeyError) as error:
      raise ValueError(
        f"{path}, row {number}: {error!r}; expected a question and "
        "metadata.gold_doc_ids."
      ) from error
  count = len(questions)
  questions = [(question, gold) for question, gold in questions if gold]
  if not questions:
    return (
      f"{path}: found {count} questions without metadata.gold_doc_ids, the ids "
      "of passages that answer them; recall is not measured. `anysearch "
      "evaluate` measures the answers."
    )
  answers = index.search([question for question, _ in questions], k)
  results = [
    (gold, {p.id for p in answer})
    for (_, gold), answer in zip(questions, answers, strict=True)
  ]
  any_share = sum(bool(gold & ids) for gold, ids in results) / len(results)
  all_share = sum(gold <= ids for gold, ids in results) / len(results)
  name = pathlib.Path(path).stem
  return (
    f"{name:24} n {len(results):5}  any {any_share:.3f}  all {all_share:.3f}"
  )


def _encoder(f: flags.FlagValues) -> Any:
  """Returns the encoder that the flags describe, or None without one."""
  names = ("pooling", "query_prefix", "passage_prefix", "max_tokens")
  settings = {name: f[name].value for name in names}
  settings["dtype"] = f.encoder_dtype
  if not f.encoder:
    unused = [name for name, value in settings.items() if value is not None]
    if unused:
      raise ValueError(
        f"found {unused[0]} without an encoder, expected --encoder=FOLDER."
      )
    return None
  from anysearch_jax.host import platforms
  from anysearch_jax.retrieval.encoder import encoder as encoder_lib

  return encoder_lib.Encoder(
    f.encoder, devices=platforms.accelerators(), **settings
  )


if __name__ == "__main__":
  define_flags()
  launch_flags.run(
    main,
    resumes=True,
    first_flags=(
      "documents",
      "corpus",
      "output",
      "update",
      "kind",
      "encoder",
      "language",
      "questions",
      "topk",
      "ocr",
    ),
  )
