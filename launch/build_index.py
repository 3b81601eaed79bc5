r"""Builds an index over documents, or over a corpus of passages.

    python -m launch.build_index --documents=notes,'papers/**/*.pdf' \
        --output=indexes/mine --update
    python -m launch.build_index --corpus=wiki-18.jsonl.gz --output=indexes/bm25
    python -m launch.build_index --corpus=wiki-18.jsonl.gz --kind=flat \
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
import json
import pathlib
from collections.abc import Callable
from typing import Any

from absl import flags

from anysearch_jax.launch import flags as launch_flags
from anysearch_jax.launch import jax_setup, progress


def define_flags() -> None:
  flags.DEFINE_string("corpus", None, "JSON lines; or see --documents.")
  flags.DEFINE_list("documents", [], "Files, folders and globs.")
  flags.DEFINE_bool("update", False, "Read only documents that changed.")
  flags.DEFINE_integer("passage", 200, "The most tokens of a passage.", 16)
  flags.DEFINE_integer("overlap", 30, "Tokens of it in the next one too.", 0)
  flags.DEFINE_string("output", None, "Folder of the index.", required=True)
  flags.DEFINE_enum(
    "kind", "bm25", ["bm25", "flat", "faiss_file", "milvus"], "See the module."
  )
  flags.DEFINE_string("encoder", None, "Hugging Face folder of the encoder.")
  flags.DEFINE_enum(
    "pooling",
    None,
    ["mean", "cls", "lasttoken"],
    "Of the encoder; here and below: if its folder does not say it rightly.",
  )
  flags.DEFINE_string("query_prefix", None, "Text before each query.")
  flags.DEFINE_string("passage_prefix", None, "Text before each passage.")
  flags.DEFINE_integer(
    "max_tokens", None, "The most tokens that the encoder reads of a text.", 1
  )
  flags.DEFINE_enum(
    "encoder_dtype",
    None,
    ["float32", "bfloat16"],
    "Of the encoder's weights: bfloat16 on accelerators, float32 on CPUs.",
  )
  flags.DEFINE_string("dtype", "float32", "Of flat: float32 or bfloat16.")
  flags.DEFINE_string("faiss_file", "", "Of kind faiss_file.")
  flags.DEFINE_integer(
    "search",
    0,
    "Of faiss_file: inverted lists (nprobe) or candidates (efSearch) that a "
    "search reads; 0: 64 lists or 256 candidates.",
    0,
  )
  flags.DEFINE_string(
    "vectors",
    "",
    "Of flat: the file of an IndexFlatIP that has the vectors of all passages "
    "(research/tevatron_vectors.py writes one from Tevatron's pickles).",
  )
  flags.DEFINE_string(
    "language",
    "english",
    "Of bm25: a language of Snowball's, such as german; any: words as they are "
    "and pairs of Chinese, Japanese or Korean characters; plain: runs of "
    "letters.",
  )
  flags.DEFINE_integer("shard", 65536, "Rows between two safe points.", 1)
  flags.DEFINE_bool("skip_malformed", False, "Drop lines that are no passage.")
  flags.DEFINE_string("address", "", "Of Milvus: a server, or a file.db.")
  flags.DEFINE_string("collection", "passages", "Its name in Milvus.")
  flags.DEFINE_string("graph", "", "Of vectors in Milvus, such as hnsw.")
  flags.DEFINE_list("fields", [], "In Milvus: of the rows, for filters.")
  flags.DEFINE_string("key_variable", None, "Variable with Milvus's key.")
  flags.DEFINE_list("questions", [], "FlashRAG's files; recall is printed.")
  flags.DEFINE_integer("topk", 3, "Passages of a question.", 1)
  flags.DEFINE_integer("process", 0, "Number of this process, from 0.", 0)
  flags.DEFINE_integer("processes", 1, "How many build together.", 1)
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
  given: dict[str, Any] = {name: f[name].value for name in names}
  lines: dict[str, progress.Line] = {}

  def on(unit: str, done: int, of: int) -> None:
    line = lines.setdefault(unit, progress.Line(max(of, 1), unit=unit))
    line.tick(done)

  encoder = _encoder(f)
  if f.documents:
    _documents(f, encoder, on)
    return
  corpus = pathlib.Path(f.corpus)
  size = corpus.stat().st_size if corpus.is_file() else 0
  if f.kind == "milvus":
    prepared = passages.prepare(
      f.corpus, f.output, skip_malformed=f.skip_malformed
    )
    _fill(f, prepared, encoder, on)
    return
  finished = building.build(
    f.corpus,
    f.output,
    building.Settings(**given),
    encoder=encoder,
    process=f.process,
    processes=f.processes,
    on_bytes=lambda done: on("MB read", done >> 20, size >> 20),
    on_rows=functools.partial(on, "passage"),
    on_plan=print,
  )
  if not finished:
    print("other processes still encode; the last one ends the work")
    return
  index = opening.open_index(
    f.output, encoder=encoder, devices=platforms.accelerators()
  )
  identity = index.identity
  print(
    f"{f.output}: {identity['kind']} over {len(index)} passages, identity "
    f"{identity['sha256'][:12]}"
  )
  if how := identity.get("search"):
    print(f"searched with {how['parameter']}={how['value']}")
  for path in f.questions:
    print(_recall(index, path, k=f.topk))
  if encoder is not None and encoder.cut:
    print(
      f"found {encoder.cut} texts that are longer than the "
      f"{encoder.settings.max_tokens} tokens that the encoder reads; no search "
      "finds what follows. Split them, or use --documents, which does."
    )


def _fill(
  f: flags.FlagValues, corpus: Any, encoder: Any, on: Callable[..., None]
) -> None:
  """Fills a collection of Milvus, and says so."""
  if not f.address:
    raise ValueError("--address: expected where Milvus is.")
  from anysearch_jax.launch import retrievers

  collection = retrievers.collection(
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
    on_rows=functools.partial(on, "passage"),
  )
  collection.client.close()
  print(f"milvus: {f.collection} of {len(corpus)} passages")


def _documents(
  f: flags.FlagValues, encoder: Any, on: Callable[[str, int, int], None]
) -> None:
  """Makes or updates the index of documents, and says what it holds."""
  from anysearch_jax.launch import documents
  from anysearch_jax.retrieval.documents import folder

  if f.kind != ("bm25" if encoder is None else "flat"):
    raise ValueError(
      f"found kind {f.kind} for documents, expected bm25, or flat with "
      "--encoder=FOLDER."
    )
  made = folder.update(
    f.documents,
    f.output,
    folder.Settings(f.passage, f.overlap, f.language),
    encoder=encoder,
    afresh=not f.update,
    on_file=functools.partial(on, "file"),
    on_rows=functools.partial(on, "passage"),
  )
  for line in documents.summary_lines(made, f.output, len(made.skipped)):
    print(line)


def _recall(index: Any, path: str, *, k: int) -> str:
  """Returns a line: for how many questions the top k have any, or all, gold."""
  asked = []
  with open(path, encoding="utf-8") as file:
    for number, line in enumerate(file, start=1):
      try:
        values = json.loads(line)
        gold = values.get("metadata", {}).get("gold_doc_ids") or ()
        asked.append((values["question"], frozenset(map(str, gold))))
      except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
          f"{path}, line {number}: {error!r}; expected a JSON object with a "
          "question and metadata.gold_doc_ids."
        ) from error
  asked = [each for each in asked if each[1]]
  if not asked:
    raise ValueError(
      f"{path}: found no question with gold passages, expected at least one."
    )
  answers = index.search([question for question, _ in asked], k)
  found = [
    (gold, {p.id for p in answer})
    for (_, gold), answer in zip(asked, answers, strict=True)
  ]
  some = sum(bool(gold & ids) for gold, ids in found) / len(found)
  every = sum(gold <= ids for gold, ids in found) / len(found)
  name = pathlib.Path(path).stem
  return f"{name:24} n {len(found):5}  any {some:.3f}  all {every:.3f}"


def _encoder(f: flags.FlagValues) -> Any:
  """Returns the encoder that the flags describe, or None without one."""
  settings = {
    name: f[name].value
    for name in ("pooling", "query_prefix", "passage_prefix", "max_tokens")
  } | {"dtype": f.encoder_dtype}
  if not f.encoder:
    found = [name for name, value in settings.items() if value is not None]
    if found:
      raise ValueError(
        f"found {found[0]} without an encoder, expected --encoder=FOLDER."
      )
    return None
  from anysearch_jax.host import platforms
  from anysearch_jax.retrieval.encoder import encoder as encoder_lib

  return encoder_lib.Encoder(
    f.encoder, devices=platforms.accelerators(), **settings
  )


if __name__ == "__main__":
  define_flags()
  launch_flags.run(main, resumes=True)
