"""How episodes are played; `config` re-exports these classes."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class EpisodeConfig:
  """Limits of one episode.

  prompts: name of an environment, such as `paper`, `world` or one of a compared
    system's.
  prompt_file: file with the texts of that environment, see docs/prompts.md; "":
    the shipped texts.
  budget_file: file with the sentences that state caps besides searches, see
    docs/prompts.md; "": the shipped ones; `silent`: caps hold and are not
    stated.
  control: file of a rule that steers searching, see launch.fit_control; "": the
    policy decides alone.
  top_k: passages that a search asks for.
  max_generated: limit on the tokens that the model writes in all turns.
  max_context: limit on all tokens of the episode.
  answered_bad_turns: how many turns without an allowed action are answered by
    an error line and followed by another turn.
  answer_room: tokens kept for the answer: when the others are used up, the
    environment asks for the answer, and one more turn may give it. 0, as in the
    paper: the episode is truncated.
  turn_deadline, search_deadline: seconds of one turn or search, including its
    time in the queue of the engine or the retriever.
  """

  prompts: str = "paper"
  prompt_file: str = ""
  budget_file: str = ""
  control: str = ""
  top_k: int = 3
  max_generated: int = 4096
  max_context: int = 32768
  answered_bad_turns: int = 2
  answer_room: int = 0
  turn_deadline: float = 600.0
  search_deadline: float = 60.0


@dataclasses.dataclass(frozen=True)
class SamplingConfig:
  """Sampling of the policy. Training needs top_p 1, top_k 0, temperature > 0.

  temperature: divides the logits; 0 is greedy.
  top_p: probability mass that is sampled from; 1 is off.
  top_k: number of tokens that are sampled from; 0 is off.
  """

  temperature: float = 1.0
  top_p: float = 1.0
  top_k: int = 0


@dataclasses.dataclass(frozen=True)
class EngineConfig:
  """The engine that samples. The in-process one compiles each call size once.

  kind: `jax`, the engine in this process, or `sglang`, servers over HTTP.
  slots: episodes whose KV cache is kept at the same time.
  max_context: tokens of one episode.
  kv_tokens: capacity of the KV cache in tokens; 0: enough for all slots. When a
    smaller cache is full, the youngest episodes are preempted and prefilled
    again later, after which near-tied tokens may come out differently.
  page: tokens in a page of the cache.
  lanes: numbers of rows that a decode call may have, ascending; a call uses the
    smallest one that holds all waiting rows. With a single number, a text does
    not depend on what else is being sampled.
  prefill_lanes x prefill_chunk: rows and tokens per row of one prefill call.
  decode_steps: limit on the tokens per row that one decode call samples before
    the rows are chosen again.
  attention: `xla`, `triton` (NVIDIA), `tpu` or `auto`, the best that can run.
  free_kv_while_training: whether the KV cache is freed before each training and
    allocated again for the next rollout, if the in-process engine shares
    devices with training and they take turns (`pipeline.async_level` 0).
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
  free_kv_while_training: bool = True


@dataclasses.dataclass(frozen=True)
class SglangConfig:
  """SGLang servers that sample, if `engine.kind` is `sglang`.

  urls: addresses of the servers; an episode stays with one of them while it is
    up.
  deadline: seconds of one turn.
  retries: retries of a request after a broken connection, within seconds.
  wait: seconds that turns wait for a server to return when all are down, for
    example during a restart.
  weights: folder in RAM through which the servers get the current weights; "":
    one under /dev/shm.
  api_key_variable: environment variable with the servers' key; "": no key.
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

  cache: answers in the LRU cache, whose key is (query, k, corpus); 0 is off.
  batch: limit on the queries of one call.
  concurrency: limit on concurrent calls.
  passage_characters: limit on a passage, title and text together; the rest is
    cut off and counted.
  answer_characters: the same limit on all passages of an answer together.
  """

  cache: int = 65536
  batch: int = 512
  concurrency: int = 4
  passage_characters: int = 65536
  answer_characters: int = 262144


@dataclasses.dataclass(frozen=True)
class TextModelConfig:
  """The language model that `retrieval.simulated` or `refined` asks.

  name: name of the model, if it is at an address.
  key_variable: environment variable with the key of that address; "": no key.
  concurrency: limit on concurrent calls to that address.
  temperature, top_p: sampling at that address; the policy's own engine samples
    as `sampling` says.
  max_tokens: limit on the tokens of a reply.
  deadline: seconds of one call; `episode.search_deadline` limits the whole
    search.
  """

  name: str = ""
  key_variable: str = ""
  concurrency: int = 64
  temperature: float = 0.8
  top_p: float = 1.0
  max_tokens: int = 600
  deadline: float = 60.0


@dataclasses.dataclass(frozen=True)
class PagesConfig:
  """Pages of the web: of search results, and of the tool `fetch`.

  first: how many results of a web search show their page instead of the
    snippet; 0: none.
  words: the most words of such a page.
  opened_words: the most words of a page that `fetch` opens.
  deadline: seconds for a page; of a search, for all of its pages.
  largest: bytes of a page that are read.
  agent: the User-Agent, by which robots.txt addresses the fetcher.
  allow_private: networks that pages may be fetched from although they are not
    public, such as `10.0.0.0/8`.
  """

  first: int = 0
  words: int = 500
  opened_words: int = 2000
  deadline: float = 15.0
  largest: int = 2_000_000
  agent: str = "anysearch_jax"
  allow_private: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class McpConfig:
  """A search tool of a Model Context Protocol server, for kind `mcp`.

  command: program and arguments of a server that is started and talked to over
    its input and output; empty: the server is at `retrieval.url`.
  variables: environment variables that the command gets besides PATH and HOME.
  tool: name of the tool; "": the only one, or `search`.
  query, k: names of its arguments for the query and the number of results; "":
    detected.
  arguments: further arguments of every call, as a JSON object; "": none.
  deadline: seconds of a call, with its retries.
  """

  command: tuple[str, ...] = ()
  variables: tuple[str, ...] = ()
  tool: str = ""
  query: str = ""
  k: str = ""
  arguments: str = ""
  deadline: float = 30.0


@dataclasses.dataclass(frozen=True)
class RetrievalConfig:
  """The retriever that answers the searches.

  kind: `lexical`, BM25 over the passages that the questions come with; `index`,
    a folder of launch.build_index; `http`, a server of Search-R1's protocol;
    `web`, a search engine; `milvus`, a collection of launch.build_milvus;
    `postgres`, a table of launch.build_postgres; `mcp`, a tool of a Model
    Context Protocol server; `pipeline`, several of these and a reranker.
  index: folder of the index.
  encoder: folder of the index's encoder, if it has moved; of the encoder of a
    collection or table.
  url: address of the server (also of SearXNG); of several, commas divide shards
    and `|` replicas.
  web: `serper`, `serpapi`, `google`, `brave`, `tavily` or `searxng`.
  engine: id of the Google engine.
  milvus: address of a Milvus server, or a file of Milvus Lite.
  collection: name of the collection; "": `passages`.
  postgres: address of a PostgreSQL database without a password, such as
    `postgresql://user@host/database`.
  table: name of its table; "": `passages`.
  ef_search: candidates of a search of a graph (`hnsw`) there; 0: 40.
  ranking: `bm25` (also ""), `dense` or `hybrid`, of Milvus and PostgreSQL.
  pipeline: TOML file of the stages of a pipeline, see docs/retrieval.md.
  filter: which passages Milvus or PostgreSQL may find, as JSON: for each field
    a value or a list of them, such as `{"source": ["wiki", "news"]}`; "": all.
  price: US dollars per search on the web, or call of an MCP tool.
  key_variable: environment variable with the token or key.
  log: file of recorded answers; "": off.
  log_mode: `record`, `replay` (asks the retriever only for what is missing) or
    `strict` (needs no retriever).
  simulated: language model that generates passages in training in place of
    the retriever (ZeroSearch). "": off; `world`: a script of the generated
    world; `policy`: the policy's own engine; anything else is the address of an
    OpenAI chat completions API (`http://host:8000/v1`).
  refined: language model that extracts what helps from the passages that were
    found (Search-o1), by the same names.
  model: settings of the calls to either language model.
  pages: of the web, with kind `web`.
  mcp: the tool, with kind `mcp`.
  """

  kind: str = "lexical"
  index: str = ""
  encoder: str = ""
  url: str = ""
  web: str = ""
  engine: str = ""
  milvus: str = ""
  collection: str = ""
  postgres: str = ""
  table: str = ""
  ef_search: int = 0
  ranking: str = ""
  pipeline: str = ""
  filter: str = ""
  price: float = 0.0
  key_variable: str = ""
  log: str = ""
  log_mode: str = "record"
  simulated: str = ""
  refined: str = ""
  model: TextModelConfig = TextModelConfig()
  pages: PagesConfig = PagesConfig()
  mcp: McpConfig = McpConfig()
