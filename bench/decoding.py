"""Compares decode and prefill of a real policy on a CPU with other engines.

    python -m bench.decoding --policy=smollm2 --llama_cpp=FOLDER --gguf=FILE

The policy is a Hugging Face folder, a GGUF file or a packaged model. Rows have
CONTEXT tokens and get STEPS more, in float32; this engine also computes in
bfloat16. transformers runs the same folder with its own cache. FOLDER has
`llama-bench` and `llama-batched-bench` of llama.cpp, and FILE the policy's
weights in float32, for example written by `convert_hf_to_gguf.py`; without them
llama.cpp is left out. All use every core, one after the other, each in a
process of its own; nothing else should run.

Prints milliseconds of a step of 1, 8 and 32 rows, tokens/s of prompts, and how
many times as fast this engine is. The floor of one row is the time to read all
weights once.
"""

from __future__ import annotations

import argparse
import csv
import functools
import io
import json
import os
import pathlib
import shlex
import subprocess
import sys
import time
from collections.abc import Callable

from anysearch_jax.policy import converted
from anysearch_jax.report import tables
from bench import harness

CONTEXT = 128
STEPS = 64
ROWS = (1, 8, 32)
# A short question, and a long observation.
PROMPTS = (57, 512)
_REPEATS = 3
_CHUNK = 64
_PAGE = 64
# Figures by name: milliseconds a step, or tokens/s of a prompt.
Figures = dict[str, float]


def _step(rows: int) -> str:
  return f"step of {rows} rows, ms" if rows > 1 else "step of 1 row, ms"


def _prompt(tokens: int) -> str:
  return f"prompt of {tokens}, tokens/s"


def _best(call: Callable[[], object]) -> float:
  """Returns the fewest seconds of some calls, after one that may compile."""
  call()
  return min(harness.seconds(call) for _ in range(_REPEATS))


def this_engine(folder: str, dtype: str) -> Figures:
  """Measures the in-process engine's own programs."""
  import numpy as np

  from anysearch_jax import config as config_lib
  from anysearch_jax.policy import hf
  from anysearch_jax.rollout.jax_engine import kv_store
  from bench import policies

  policy = hf.load(folder)
  a = policy.architecture
  params = policies.engine_weights(policy.params, a, dtype)
  figures = {}
  for rows in ROWS:
    engine = config_lib.EngineConfig(
      slots=rows,
      max_context=1024,
      page=_PAGE,
      lanes=(rows,),
      decode_steps=STEPS,
      prefill_lanes=1,
      prefill_chunk=_CHUNK,
    )
    decoder = policies.Decoder(a, engine, dtype=dtype, params=params)
    seconds = _best(functools.partial(decoder, CONTEXT))
    figures[_step(rows)] = 1e3 * seconds / STEPS

  def prefill(tokens: int) -> None:
    for start in range(0, tokens, _CHUNK):
      decoder.prefill(
        kv_store.Chunks(
          table=decoder.table[:1],
          tokens=np.ones((1, _CHUNK), np.int32),
          starts=np.asarray([start], np.int32),
          counts=np.asarray([min(_CHUNK, tokens - start)], np.int32),
        )
      )

  for tokens in PROMPTS:
    seconds = _best(functools.partial(prefill, tokens))
    figures[_prompt(tokens)] = tokens / seconds
  read_seconds = decoder.weight_bytes() / harness.bandwidth(1 << 29)
  figures["floor of 1 row, ms"] = 1e3 * read_seconds
  return figures


def transformers_engine(folder: str) -> Figures:
  """Measures transformers with its default cache and attention."""
  import torch
  import transformers

  torch.set_num_threads(os.cpu_count() or 1)
  model = transformers.AutoModelForCausalLM.from_pretrained(
    folder, dtype=torch.float32
  ).eval()
  figures = {}
  with torch.inference_mode():
    for rows in ROWS:
      ids = torch.ones(rows, CONTEXT, dtype=torch.long)
      output = model(ids, use_cache=True, logits_to_keep=1)
      cache = output.past_key_values
      token = output.logits[:, -1].argmax(-1, keepdim=True)
      began = time.perf_counter()
      for _ in range(STEPS):
        output = model(token, past_key_values=cache, use_cache=True)
        token = output.logits[:, -1].argmax(-1, keepdim=True)
      figures[_step(rows)] = 1e3 * (time.perf_counter() - began) / STEPS
    for tokens in PROMPTS:
      ids = torch.ones(1, tokens, dtype=torch.long)
      prefill = functools.partial(model, ids, use_cache=True, logits_to_keep=1)
      figures[_prompt(tokens)] = tokens / _best(prefill)
  return figures


def llama_cpp(folder: pathlib.Path, gguf: str) -> Figures:
  """Measures llama.cpp's own benchmarks, as they are by default."""
  threads = os.cpu_count()

  gguf = shlex.quote(gguf)

  def printed(name: str, options: str) -> str:
    return subprocess.run(
      [folder / name, *shlex.split(options)],
      check=True,
      capture_output=True,
      text=True,
    ).stdout

  def one_row(options: str) -> float:
    """Returns tokens/s of `llama-bench`, which warms up first."""
    lines = printed(
      "llama-bench",
      f"--model {gguf} --threads {threads} --output csv {options}",
    )
    (measured,) = csv.DictReader(io.StringIO(lines))
    return float(measured["avg_ts"])

  def step_seconds(rows: int) -> float:
    tokens = rows * (CONTEXT + STEPS)
    lines = printed(
      "llama-batched-bench",
      f"-m {gguf} -t {threads} -npp {CONTEXT} -ntg {STEPS} -npl {rows} "
      f"-c {tokens} --output-format jsonl",
    ).splitlines()
    measured = [line for line in lines if line.startswith("{")]
    return json.loads(measured[-1])["t_tg"] / STEPS

  figures = {
    _prompt(tokens): one_row(f"--n-prompt {tokens} --n-gen 0")
    for tokens in PROMPTS
  }
  speed = one_row(f"--n-prompt 0 --n-gen {STEPS} --n-depth {CONTEXT}")
  figures[_step(1)] = 1e3 / speed
  for rows in ROWS[1:]:
    seconds = min(step_seconds(rows) for _ in range(_REPEATS))
    figures[_step(rows)] = 1e3 * seconds
  return figures


def _in_process(*arguments: str) -> Figures:
  """Measures one engine in a process of its own."""
  printed = subprocess.run(
    [sys.executable, "-m", "bench.decoding", *arguments],
    check=True,
    stdout=subprocess.PIPE,
    text=True,
  ).stdout
  return json.loads(printed.splitlines()[-1])


def main() -> None:
  parser = argparse.ArgumentParser()
  parser.add_argument("--policy", default="smollm2")
  parser.add_argument("--llama_cpp", type=pathlib.Path)
  parser.add_argument("--gguf")
  parser.add_argument("--only", choices=("float32", "bfloat16", "transformers"))
  args = parser.parse_args()
  folder = converted.folder(args.policy)
  if args.only == "transformers":
    print(json.dumps(transformers_engine(folder)))
    return
  if args.only:
    print(json.dumps(this_engine(folder, args.only)))
    return
  results = {
    name: _in_process(f"--policy={folder}", f"--only={name}")
    for name in ("float32", "bfloat16", "transformers")
  }
  if args.llama_cpp:
    results["llama.cpp"] = llama_cpp(args.llama_cpp, args.gguf)
  others = [name for name in results if name not in ("float32", "bfloat16")]
  header = ["", *results, *(f"float32 / {name}" for name in others)]
  rows = [header]
  for name in [*map(_step, ROWS), *map(_prompt, PROMPTS)]:
    row = [name, *(f"{result[name]:.1f}" for result in results.values())]
    for other in others:
      ratio = results[other][name] / results["float32"][name]
      row.append(f"{ratio if name.endswith('ms') else 1 / ratio:.2f}")
    rows.append(row)
  print("\n".join(tables.aligned(rows)))
  floor = results["float32"]["floor of 1 row, ms"]
  print(f"\nfloor of a row in float32: {floor:.1f} ms")


if __name__ == "__main__":
  main()
