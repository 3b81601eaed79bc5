r"""Prepares questions for training and evaluation, yours or published ones.

    anysearch prepare_data --input=mine.jsonl --split=0.8 --output=data/mine
    anysearch prepare_data --folder=flashrag --output=data/qa
    anysearch prepare_data --input=nq:train=NQ-open.train.jsonl \
        --input=hotpotqa:dev=hotpot_dev_distractor_v1.json --output=data/qa \
        --mix=nq

The first command trains on 80 % of your questions and evaluates on the others;
the text of a question decides, so that it stays where it is when you add more.

The second is the paper's setup: training on a mix of NQ and HotpotQA, and seven
evaluation sets. The folder contains
`<dataset>/<split>.jsonl` or `<dataset>_<split>.jsonl` (with any suffix that
--input accepts). An input is `DATASET:SPLIT=FILE`, `DATASET:SPLIT:FORMAT=FILE`
or, if its rows name their data set and split, `FILE`. The formats of
anysearch_jax/data/formats.py are recognised by their columns.

    anysearch prepare_data --folder=flashrag --output=data/qa \
        --complete_corpus=wiki-18.jsonl.gz

also writes data/qa/corpus.jsonl.gz: the corpus, and after it the supporting
passages of the questions that it lacks. Index that file.

The output folder appears complete or not at all. Running the same command again
checks the existing folder.
"""

from __future__ import annotations

import dataclasses
import pathlib
import re
from collections.abc import Sequence

from absl import flags

from anysearch_jax.config import settings as config_settings
from anysearch_jax.data import files, formats, prepared, preparing
from anysearch_jax.host import disk, listing
from anysearch_jax.launch import flags as launch_flags
from anysearch_jax.launch import progress
from anysearch_jax.retrieval import completed_corpus

# The paper's sets, as <dataset>_<split>: two for training, seven evaluated.
PAPER = (
  "nq_train",
  "hotpotqa_train",
  "nq_test",
  "triviaqa_test",
  "popqa_test",
  "hotpotqa_dev",
  "2wikimultihopqa_dev",
  "musique_dev",
  "bamboogle_test",
)
_PAPER_MIX = ("nq", "hotpotqa")
_INPUT = re.compile(r"([\w.-]+):(\w+)(?::(\w+))?=(.+)")


def define_flags() -> None:
  flags.DEFINE_multi_string(
    "input",
    [],
    "A file of questions: FILE with --split or if its rows name their data set "
    "and split, otherwise DATASET:SPLIT=FILE or DATASET:SPLIT:FORMAT=FILE; may "
    "be repeated.",
  )
  flags.DEFINE_float(
    "split",
    None,
    "Share of the questions to train on, such as 0.8, where neither file nor "
    "row names a split; the others are for evaluation.",
    0.0,
    1.0,
  )
  flags.DEFINE_string(
    "folder",
    None,
    "Folder of question files that are named <dataset>/<split>.jsonl or "
    "<dataset>_<split>.jsonl.",
  )
  flags.DEFINE_list(
    "sets",
    None,
    "Sets to read from --folder, as nq_train,nq_test; `all` reads all. "
    "Default: those of the paper's sets that the folder has.",
  )
  flags.DEFINE_string(
    "output",
    None,
    "Folder to write, which config.data.path then names.",
    required=True,
  )
  flags.DEFINE_list(
    "mix",
    None,
    "Datasets whose training questions are mixed into one split; default: "
    "nq,hotpotqa if there are training questions of one of them, otherwise all "
    "that have some. --mix= mixes none.",
  )
  flags.DEFINE_bool(
    "skip_malformed",
    False,
    "Drop rows that are no question; without it they are an error. Lines of "
    "--complete_corpus that are no passage remain and are not read.",
  )
  flags.DEFINE_string(
    "passages",
    None,
    "File of the corpus whose ids are in gold_doc_ids of training questions; "
    "their passages become evidence.",
  )
  flags.DEFINE_string(
    "complete_corpus",
    None,
    "Corpus (JSON lines, .gz) of which --output gets a copy that has the "
    "supporting passages of the questions too; gold_doc_ids name them.",
  )
  flags.DEFINE_bool(
    "evidence",
    False,
    "Leave out training questions without evidence, which StepSearch needs.",
  )
  flags.DEFINE_string(
    "aliases",
    None,
    "id_aliases.json of 2WikiMultihopQA, whose aliases by answer_id are right "
    "answers too.",
  )
  flags.DEFINE_string(
    "canary",
    "",
    "Password that decrypts BrowseComp-Plus: DEFAULT_CANARY in its "
    "decrypt_dataset.py.",
  )


def main(argv: Sequence[str]) -> None:
  print(run(flags.FLAGS))


def run(f: flags.FlagValues) -> str:
  """Prepares the questions that the flags name.

  Returns:
    A table of the questions read, kept and dropped, as text.
  """
  if not (f.input or f.folder):
    raise ValueError("Found nothing to read; name --folder or --input.")
  inputs = [_parse_input(text) for text in f.input]
  if f.folder:
    inputs += _find(pathlib.Path(f.folder), f.sets)
  settings = preparing.Settings(
    mix=tuple(map(preparing.dataset_name, filter(None, f.mix or ()))),
    skip_malformed=f.skip_malformed,
    evidence=f.evidence,
  )
  folder = pathlib.Path(f.output)
  passages = pathlib.Path(f.passages) if f.passages else None
  aliases = pathlib.Path(f.aliases) if f.aliases else None
  parts, input_records = preparing.prepare(
    inputs,
    settings,
    aliases=preparing.read_aliases(aliases) if aliases else {},
    corpus=passages,
    canary=f.canary,
    train_share=f.split or 0.0,
  )
  if f.split:
    _require_both_splits(f.split, parts)
  if f.mix is None:
    settings = dataclasses.replace(settings, mix=_default_mix(parts))
  manifest = {"settings": dataclasses.asdict(settings), "inputs": input_records}
  if f.split:
    manifest["split"] = f.split
  for name, path in (("aliases", aliases), ("passages", passages)):
    if path:
      manifest[name] = {"path": str(path), **disk.fingerprint(path)}
  completed = None
  if f.complete_corpus:
    preparing.mix(parts, settings)  # Refuses a mix before minutes of reading.
    completed = _complete(parts, pathlib.Path(f.complete_corpus), settings)
    parts = completed.parts
    manifest["corpus"] = completed.manifest()
  mixed = preparing.mix(parts, settings)
  prepared.write(
    folder, parts, mixed, manifest, completed.write if completed else None
  )
  lines = [_table(parts, mixed)]
  if completed:
    lines += _corpus_lines(completed, folder)
  return "\n".join([*lines, f"prepared: {folder}"])


def _complete(
  parts: preparing.Parts, corpus: pathlib.Path, settings: preparing.Settings
) -> completed_corpus.CompletedCorpus:
  """Completes a corpus, with a line of progress."""
  size = corpus.stat().st_size if corpus.is_file() else 0
  line = progress.Line(max(size >> 20, 1), unit="MB read")
  return completed_corpus.complete(
    parts,
    corpus,
    skip_malformed=settings.skip_malformed,
    on_bytes=lambda done: line.tick(done >> 20),
  )


def _corpus_lines(
  completed: completed_corpus.CompletedCorpus, folder: pathlib.Path
) -> list[str]:
  """Formats what the corpus lacked, one line per dataset and split."""
  columns = ("questions", "named", "in_corpus", "added")
  header = " ".join(f"{name.replace('_', ' '):>9}" for name in columns)
  lines = [f"{'gold documents':24} {header}"]
  for name, counts in completed.counts.items():
    notes = []
    if count := counts["added_to_title"]:
      notes.append(f"{count} added to other text of their title")
    if count := counts["left_out"]:
      notes.append(f"{count} left out, without title or text")
    cells = " ".join(f"{counts[column]:9}" for column in columns)
    lines.append(f"{name:24} {cells}  {'; '.join(notes)}".rstrip())
  path = folder / completed.name
  return [*lines, f"corpus: {path} has {completed.added} more passages"]


def _require_both_splits(share: float, parts: preparing.Parts) -> None:
  """Refuses a share that leaves nothing to train or to evaluate on."""
  for split in ("train", "test"):
    if not any(n.endswith(f"_{split}") and parts[n].entries for n in parts):
      count = sum(len(part.entries) for part in parts.values())
      raise ValueError(
        f"--split={share}: found no question for {split} among {count}; "
        "expected more questions, another share, or a file for each split: "
        "--input=mine:train=FILE --input=mine:test=FILE."
      )


def _default_mix(parts: preparing.Parts) -> tuple[str, ...]:
  """Returns the datasets to train on: the paper's, or all that are here."""
  names = [n.removesuffix("_train") for n in parts if n.endswith("_train")]
  return tuple(names) if set(names).isdisjoint(_PAPER_MIX) else _PAPER_MIX


def _parse_input(text: str) -> preparing.Input:
  """Parses an --input flag."""
  match = _INPUT.fullmatch(text)
  if not match:
    return preparing.Input(pathlib.Path(text))
  dataset, split, format_, path = match.groups(default="")
  if format_:
    config_settings.require(f"--input={text}: format", format_, formats.FORMATS)
  return preparing.Input(
    path=pathlib.Path(path),
    dataset=preparing.dataset_name(dataset),
    split=preparing.split_name(split),
    format=format_,
  )


def _find(
  folder: pathlib.Path, sets: Sequence[str] | None
) -> list[preparing.Input]:
  """Finds the question files of a folder, in FlashRAG's layout or flat.

  Args:
    folder: the folder.
    sets: names of sets; ("all",): all; None: those of the paper that the folder
      has.
  """
  inputs_by_name: dict[str, preparing.Input] = {}
  for path in sorted([*folder.glob("*/*"), *folder.glob("*")]):
    stem = path.name.lower().removesuffix(".gz").removesuffix(files.kind(path))
    is_flat = path.parent == folder
    dataset, _, split = stem.rpartition("_")
    if not is_flat:
      dataset = path.parent.name
      split = stem
    if not (dataset and files.kind(path) and path.is_file()):
      continue
    try:
      split = preparing.split_name(split)
      dataset = preparing.dataset_name(dataset)
    except formats.DataError:
      continue
    name = f"{dataset}_{split}"
    if name in inputs_by_name:
      raise ValueError(
        f"{name} is both {inputs_by_name[name].path} and {path}; remove one, "
        "or name each with --input."
      )
    inputs_by_name[name] = preparing.Input(path, dataset, split)
  set_names = PAPER if sets is None else tuple(sets)
  if set_names == ("all",):
    set_names = tuple(inputs_by_name)
  elif missing := sorted(set(set_names) - inputs_by_name.keys()):
    if sets is not None:
      raise ValueError(
        f"{folder}: found no file of {listing.first_names(missing)}."
      )
  inputs = [
    inputs_by_name[name] for name in set_names if name in inputs_by_name
  ]
  if not inputs:
    names = listing.first_names(inputs_by_name) or "no <dataset>/<split>.jsonl"
    expected = listing.first_names(set_names, limit=len(PAPER))
    raise ValueError(
      f"{folder}: found {names}; expected {expected}, or others named by "
      "--sets."
    )
  return inputs


def _table(parts: preparing.Parts, mixed: Sequence[preparing.Entry]) -> str:
  """Formats the counts of rows, one line per dataset and split."""
  lines = [f"{'':24} {'read':>8} {'kept':>8}  dropped"]
  for name, part in parts.items():
    notes = [f"{n} {reason}" for reason, n in sorted(part.dropped.items())]
    if part.unmatched:
      notes.append(
        f"kept {part.unmatched} that exact match accepts no answer to"
      )
    lines.append(
      f"{name:24} {part.read:8} {len(part.entries):8}  "
      f"{listing.first_names(notes, characters=200)}".rstrip()
    )
  lines.append(f"{prepared.MIX + ' (mixed)':24} {'':8} {len(mixed):8}")
  return "\n".join(lines)


if __name__ == "__main__":
  define_flags()
  launch_flags.run(main)
