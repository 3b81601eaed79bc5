"""The notebook over one's own documents runs in Jupyter's own client."""

from __future__ import annotations

import chat_endpoint
import nbclient
import nbformat
import source_tree

# What a question needs: the words of each search, and then a line of a note.
NEEDS = {
  "When did the Orlan bakery open?": (["bakery 1931"], "in 1931"),
  "Who designed the Veddel bridge?": (["Veddel bridge"], "Jon Akers designed"),
  "When does the lease of the Veddel office end?": (["lease"], "31 March 2027"),
  "When does the lease of the office end?": (["lease"], "31 March 2027"),
  "How many people work in the Veddel office?": (["staff"], "staff of 14"),
  "Where was the founder of the Orlan bakery born?": (
    ["Orlan bakery opened", "Mira Tasse born"],
    "born in Hasle",
  ),
  "Where did the designer of the Veddel bridge study?": (
    ["Veddel bridge designed", "Jon Akers studied"],
    "studied in Delft",
  ),
}


def reads(body):
  """Plays a model that searches for what a question needs, and reads it."""
  messages = body["messages"]
  asked = next((q for q in NEEDS if q in messages[0]["content"]), None)
  if asked is None:  # The probe.
    return chat_endpoint.Message("", (chat_endpoint.search("lease"),))
  queries, line = NEEDS[asked]
  found = "".join(m["content"] for m in messages if m["role"] == "tool")
  made = sum(m["role"] == "assistant" for m in messages)
  if body.get("tool_choice") != "none" and made < len(queries):
    return chat_endpoint.Message("", (chat_endpoint.search(queries[made]),))
  return chat_endpoint.Message(f"{line} [1]." if line in found else "Unknown.")


def test_notebook_draws_accuracy_over_the_budget(tmp_path, monkeypatch):
  path = source_tree.ROOT / "examples" / "documents.ipynb"
  notebook = nbformat.read(path, as_version=4)
  with chat_endpoint.served(reads) as server:
    monkeypatch.setenv("ANYSEARCH_OPENAI_URL", server.url)
    monkeypatch.setenv("ANYSEARCH_OPENAI_MODEL", chat_endpoint.NAME)
    monkeypatch.setenv("PYTHONPATH", str(source_tree.ROOT))
    client = nbclient.NotebookClient(
      notebook, timeout=120, resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()
  outputs = [o for cell in notebook.cells for o in cell.get("outputs", ())]
  said = "".join(o.text for o in outputs if o.output_type == "stream")
  assert "[1] my_notes/lease.md: " in said
  # Without a search nothing is known, one finds four of six, two find all.
  rows = ["0: 0% right, 0.0", "1: 67% right, 1.0", "2: 100% right, 1.3"]
  assert all(f"budget {row} searches" in said for row in rows), said
  assert any("image/png" in o.get("data", {}) for o in outputs)
