"""Plays llama.cpp's `llama-server`: the same flags, routes and life, no model.

`installed` writes a program `llama-server` into a folder for the PATH. What it
does is decided by the name of the GGUF file: `dies`, `hangs` or anything else.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import sys
import time

CONTEXT = 4096
SLOTS = 2


def installed(folder: pathlib.Path) -> pathlib.Path:
  """Writes the program; returns its folder."""
  program = folder / "llama-server"
  program.write_text(f'#!/bin/sh\nexec {sys.executable} -P {__file__} "$@"\n')
  program.chmod(0o755)
  return folder


def gguf(folder: pathlib.Path, name: str = "small") -> pathlib.Path:
  """Writes a file that begins as GGUF files do."""
  file = folder / f"{name}.gguf"
  file.write_bytes(b"GGUF\3\0\0\0")
  return file


def main() -> None:
  sys.path.insert(0, str(pathlib.Path(__file__).parent))
  import chat_endpoint
  import web_site

  parser = argparse.ArgumentParser()
  parser.add_argument("--model", type=pathlib.Path)
  parser.add_argument("--alias")
  parser.add_argument("--host")
  parser.add_argument("--port", type=int)
  parser.add_argument("--ctx-size", type=int)
  parser.add_argument("--jinja", action="store_true")
  args = parser.parse_args()
  print(f"loading model '{args.model}'", flush=True)
  if args.model.stem == "dies":
    print("E failed to load model: unknown architecture", flush=True)
    sys.exit(1)
  if args.model.stem == "crashes":
    os.kill(os.getpid(), 4)
  if args.model.stem == "hangs":
    time.sleep(600)
  with chat_endpoint.served(port=args.port, models=(args.alias,)) as server:
    settings = {"n_ctx": min(CONTEXT, args.ctx_size)}
    props = {"default_generation_settings": settings, "total_slots": SLOTS}
    reply = web_site.reply(200, json.dumps(props).encode(), "application/json")
    server.site.pages["/props"] = reply
    server.site.pages["/health"] = web_site.reply(200, b"{}")
    time.sleep(600)


if __name__ == "__main__":
  main()
