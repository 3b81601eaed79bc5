"""`--search` and `--embeddings` of `ask`, `chat` and `serve`."""

from __future__ import annotations

import asyncio
import re

import chat_endpoint
import commands
import embeddings_server
import pytest

from anysearch_jax import types
from anysearch_jax.launch import ask, documents, policies, retrievers
from anysearch_jax.launch import flags as launch_flags
from anysearch_jax.retrieval.documents import following
from anysearch_jax.retrieval.encoder import installed

CAT = "A young cat sleeps on the couch."
QUESTION = "kitten sofa flat"


@pytest.fixture
def notes(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
  (tmp_path / "notes").mkdir()
  (tmp_path / "notes/cat.txt").write_text(CAT)
  for number in range(3):
    text = f"Part {number} of the lease of the flat."
    (tmp_path / f"notes/lease{number}.txt").write_text(text)
  return tmp_path / "notes"


def hits(*arguments):
  """Returns the files of the passages that the command `ask` found."""
  with chat_endpoint.served(queries=[QUESTION]) as server:
    ended, printed = commands.printed(
      *(ask, "--documents=notes", f"--openai={server.url}"),
      *("--budget=1", *arguments),
      QUESTION,
    )
  assert not ended, ended
  found = printed.partition("search 1: ")[2].partition("answer: ")[0]
  return re.findall(r"\] (\w+)\.txt", found)


@pytest.mark.parametrize(
  ("arguments", "files"),
  [
    ([], {"cat", "lease0", "lease1", "lease2"}),
    (["--search=hybrid"], {"cat", "lease0", "lease1", "lease2"}),
    (["--search=dense"], {"cat", "lease0", "lease1", "lease2"}),
    (["--search=words"], {"lease0", "lease1", "lease2"}),
  ],
)
def test_ask_searches_as_the_flag_says(notes, arguments, files):
  found = hits(*arguments)
  assert {*found} == files
  assert found[0] == "cat" or "--search=dense" not in arguments


def test_ask_over_served_embeddings(notes):
  with embeddings_server.served() as server:
    assert "cat" in hits(f"--embeddings={server.url}")
    passages = [text for text in server.asked if text != QUESTION]
    assert len({*passages}) == 4
    assert hits(f"--embeddings={server.url}", "--search=dense")[0] == "cat"
    assert server.asked.count(QUESTION) == 2


def test_words_are_searched_without_an_encoder(notes, monkeypatch):
  monkeypatch.setattr(installed, "is_installed", lambda: False)
  installed.open_encoder.cache_clear()
  assert "cat" not in hits()
  with chat_endpoint.served("tools") as server:
    ended, _ = commands.printed(
      *(ask, "--documents=notes", f"--openai={server.url}"),
      *("--search=dense", QUESTION),
    )
  assert "pip install 'anysearch_jax[dense]', or --embeddings=URL" in str(ended)


def test_a_server_of_embeddings_that_is_gone_is_a_sentence(notes):
  with embeddings_server.served() as server:
    gone = server.url
  with chat_endpoint.served("tools") as server:
    ended, _ = commands.printed(
      *(ask, "--documents=notes", f"--openai={server.url}"),
      *(f"--embeddings={gone}", QUESTION),
    )
  assert "--embeddings: " in str(ended)
  assert "Does a server with OpenAI's embeddings run there?" in str(ended)


def test_serve_embeds_only_what_changed(notes, monkeypatch):
  monkeypatch.setattr(following, "_LOOK_SECONDS", 0.0)
  with embeddings_server.served() as server, commands.defined(policies):
    launch_flags._parse_argv(
      ["command", "--documents=notes", f"--embeddings={server.url}"]
    )
    config = documents.read_config()
    documents.update(config)
    retriever = documents.followed(
      config, lambda: retrievers.make(config, None)
    )
    request = types.SearchRequest("kitten on the sofa", 1)
    assert [p.text for p in asyncio.run(retriever.search(request))] == [CAT]
    count = len(server.asked)
    (notes / "cat.txt").unlink()
    (notes / "pet.txt").write_text("A kitten on a sofa.")
    (passage,) = asyncio.run(retriever.search(request))
    assert passage.text == "A kitten on a sofa."
    assert sorted(server.asked[count:]) == [
      # The model of the opened index is compared by its first passage.
      '"lease0.txt"\nPart 0 of the lease of the flat.',
      '"pet.txt"\nA kitten on a sofa.',
      "kitten on the sofa",
    ]


def test_passages_that_are_not_read_to_their_end_are_counted(
  notes, monkeypatch
):
  sentences = []
  monkeypatch.setattr(documents.stopping, "say", sentences.append)
  (notes / "long.txt").write_text("The flat has a very large kitchen. " * 20)
  with embeddings_server.served(longest=500) as server:
    hits(f"--embeddings={server.url}")
  (sentence,) = [text for text in sentences if "only the beginning" in text]
  assert "of 1 texts; their ends are found by words" in sentence
