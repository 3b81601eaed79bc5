"""The part of the configuration that says how episodes are played.

`config` has these names too.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class EpisodeConfig:
  """Limits of one episode.

  prompts: a prompt set of `prompts.PROMPTS`. max_generated: model tokens over
  all turns. max_context: tokens in all. answered_bad_turns: bad turns that get
  a line and another try. turn_deadline, search_deadline: seconds of one of
  them, time in the engine's or retriever's queue included.
  """

  prompts: str = "paper"
  top_k: int = 3
  max_generated: int = 4096
  max_context: int = 32768
  answered_bad_turns: int = 2
  turn_deadline: float = 600.0
  search_deadline: float = 60.0


@dataclasses.dataclass(frozen=True)
class SamplingConfig:
  """Sampling of the policy. Training needs top_p 1, top_k 0, temperature > 0.

  temperature 0 is greedy; top_k 0 and top_p 1 are off.
  """

  temperature: float = 1.0
  top_p: float = 1.0
  top_k: int = 0


@dataclasses.dataclass(frozen=True)
class EngineConfig:
  """The engine that samples; each shape of the in-process one compiles once.

  kind: `jax`, the engine in this process, or `sglang`, servers over HTTP.
  slots: episodes whose KV cache is kept at a time. max_context: tokens of one.
  kv_tokens: tokens that the KV cache holds; 0: all that the slots can need.
    With less, the youngest episodes give way where it is full and are prefilled
    again, so that a text may differ from another run's at a near tie.
  page: tokens of a page of the cache.
  lanes: rows of a decode call, ascending: the least that hold those that wait
    run. With one size only, a text does not depend on what runs beside it.
  prefill_lanes x prefill_chunk: tokens of one prefill call.
  decode_steps: tokens a decode call samples at most before rows regroup.
  attention: `xla`, `triton` (NVIDIA), `tpu` or `auto`, the best that can run.
  """

  kind: str = "jax"
  slots: int = 80
  max_context: int = 544
  kv_tokens: int = 0
  page: int = 16
  lanes: tuple[int, ...] = (32,)
  prefill_lanes: int = 16
  prefill_chunk: int = 32
  decode_steps: int = 16
  attention: str = "auto"


@dataclasses.dataclass(frozen=True)
class SglangConfig:
  """SGLang servers that sample, where `engine.kind` is `sglang`.

  urls: of the servers; an episode stays with one of them while it is up.
  deadline: seconds of one turn. retries: of a request that met a broken
  connection, within seconds. wait: seconds that turns wait for a server to come
  back while none is up, a restart's. weights: folder that the present weights
  are handed over in, in RAM; "": one under /dev/shm.
  api_key_variable: environment variable with the servers' key; "" is none.
  """

  urls: tuple[str, ...] = ("http://127.0.0.1:30000",)
  deadline: float = 600.0
  retries: int = 3
  wait: float = 300.0
  weights: str = ""
  api_key_variable: str = ""


@dataclasses.dataclass(frozen=True)
class SearchConfig:
  """How the searches of many episodes reach the retriever.

  cache: answers kept by (query, k, corpus), least recently used leave first; 0
  keeps none. batch: queries of one call at most. concurrency: calls at a time.
  passage_characters: of a passage, title and text together; answer_characters:
  of all passages of an answer. What is beyond is cut off, and counted.
  """

  cache: int = 65536
  batch: int = 512
  concurrency: int = 4
  passage_characters: int = 65536
  answer_characters: int = 262144


@dataclasses.dataclass(frozen=True)
class TextModelConfig:
  """The language model that `retrieval.simulated` or `refined` asks.

  name: of the model at an address; key_variable: environment variable with its
  key, "" is none; concurrency: calls at a time there.
  temperature, top_p: there; the policy's own engine samples by `sampling`.
  max_tokens: of a reply. deadline: seconds of a call; the whole search has
  `episode.search_deadline`.
  """

  name: str = ""
  key_variable: str = ""
  concurrency: int = 64
  temperature: float = 0.8
  top_p: float = 1.0
  max_tokens: int = 600
  deadline: float = 60.0


@dataclasses.dataclass(frozen=True)
class RetrievalConfig:
  """What answers the searches.

  kind: `lexical`, BM25 over the passages that the questions come with; `index`,
    a folder of launch.build_index; `http`, a server of Search-R1's protocol;
    `web`, a search engine.
  index: the folder; encoder: its encoder's, if that has moved. url: of the
  server. web: `serper`, `google` (with its `engine` id) or `brave`; price: US
  dollars a search. key_variable: environment variable with the token or key.
  log: file of recorded answers, "" is none; log_mode: `record`, `replay` (asks
  for what is missing) or `strict` (needs no retriever).
  simulated: who makes passages up in training instead (ZeroSearch), "" nobody;
  `world`, a script of the generated world; `policy`, the policy's own engine;
  else the address of OpenAI's chat completions (`http://host:8000/v1`).
  refined: who reads what was found and hands back what helps (Search-o1); the
  same names. model: at the address, or of the calls to the policy.
  """

  kind: str = "lexical"
  index: str = ""
  encoder: str = ""
  url: str = ""
  web: str = ""
  engine: str = ""
  price: float = 0.0
  key_variable: str = ""
  log: str = ""
  log_mode: str = "record"
  simulated: str = ""
  refined: str = ""
  model: TextModelConfig = TextModelConfig()
