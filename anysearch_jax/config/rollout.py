"""How episodes are played; `config` re-exports these classes."""

from __future__ import annotations

import dataclasses

from anysearch_jax import types
from anysearch_jax.config.settings import (
  POSITIVE,
  TOP_P,
  at_least,
  check,
  identity,
  learning,
  one_of,
  placement,
)


@dataclasses.dataclass(frozen=True)
class EpisodeConfig:
  """Limits of one episode."""

  prompts: str = identity("paper")
  """Name of an environment, such as `paper`, `world` or one of a compared
  system's."""
  prompt_file: str = placement("")
  """File with the texts of that environment, see docs/own.md; "": the
  shipped texts."""
  budget_file: str = placement("")
  """File with the sentences that state caps besides searches, see
  docs/own.md; "": the shipped ones; `silent`: caps hold and are not stated.
  """
  top_k: int = learning(3, at_least(1))
  """Passages that a search asks for."""
  max_generated: int = learning(4096, at_least(1))
  """Limit on the tokens that the model writes in all turns."""
  max_context: int = learning(32768, at_least(1))
  """Limit on all tokens of the episode."""
  max_turn: int = learning(0, at_least(0))
  """Limit on the tokens of one turn. A turn that reaches it ends without an
  action, and the episode continues. 0: only the episode's limits."""
  answered_bad_turns: int = learning(2, at_least(0))
  """Number of turns without an allowed action that are answered by an error
  line and followed by another turn."""
  answer_room: int = learning(0, at_least(0))
  """Tokens reserved for the answer. When all others are used up, the
  environment asks for the answer, and the policy gets one more turn. 0, as in
  the paper: the episode is truncated."""
  turn_deadline: float = placement(600.0, POSITIVE)
  """Seconds of one turn, including its time in the engine's queue."""
  search_deadline: float = placement(60.0, POSITIVE)
  """Seconds of one search, without the time that it waits to be sent
  (`retrieval.wait`)."""

  def within(self, context: int) -> EpisodeConfig:
    """Returns limits that fit a model's context.

    Args:
      context: the most tokens that the model reads and writes, > 0.
    """
    max_context = min(context, self.max_context)
    max_generated = min(max_context // 2, self.max_generated)
    return dataclasses.replace(
      self, max_context=max_context, max_generated=max_generated
    )


@dataclasses.dataclass(frozen=True)
class SamplingConfig:
  """Sampling of the policy.

  Training needs top_p 1, top_k 0 and a temperature above 0.
  """

  temperature: float = learning(1.0, at_least(0))
  """Divides the logits; 0 is greedy."""
  top_p: float = learning(1.0, TOP_P)
  """Probability mass that is sampled from; 1 is off."""
  top_k: int = learning(0, at_least(0))
  """Number of tokens that are sampled from; 0 is off."""

  def for_request(self, request: types.GenerateRequest) -> SamplingConfig:
    """Returns the settings for a request, whose own values replace these.

    Raises:
      ValueError: a setting of the request is out of its range.
    """
    values = {
      name: value
      for name in ("temperature", "top_p", "top_k")
      if (value := getattr(request, name)) is not None
    }
    if not values:
      return self
    sampling = dataclasses.replace(self, **values)
    check(sampling, "sampling")
    return sampling


@dataclasses.dataclass(frozen=True)
class EngineConfig:
  """The engine that samples.

  The in-process one compiles each call size once.
  """

  kind: str = placement("jax", one_of("jax", "sglang", "vllm"))
  """`jax`, the engine in this process; `sglang` or `vllm`, servers over HTTP.
  """
  slots: int = placement(80, at_least(1))
  """Episodes whose KV cache is kept at the same time."""
  max_context: int = placement(544, at_least(1))
  """Tokens of one episode."""
  kv_tokens: int = placement(0, at_least(0))
  """Capacity of the KV cache in tokens; 0: enough for all slots. When a smaller
  cache is full, the youngest episodes are preempted and prefilled again later,
  after which near-tied tokens may come out differently. Layers with windows
  have what those of all slots need, if it is less."""
  page: int = placement(16, at_least(1))
  """Tokens in a page of the cache."""
  lanes: tuple[int, ...] = placement((32,), at_least(1))
  """Numbers of rows that a decode call may have, ascending; a call uses the
  smallest one that holds all waiting rows. With a single number, a text does
  not depend on what else is being sampled."""
  prefill_lanes: int = placement(16, at_least(1))
  """Rows of one prefill call."""
  prefill_chunk: int = placement(32, at_least(1))
  """Tokens per row of one prefill call."""
  decode_steps: int = placement(16, at_least(1))
  """Limit on the tokens per row that one decode call samples before the rows
  are chosen again."""
  exact: bool = learning(False)
  """Whether one program prefills, samples and scores, so that the importance
  ratio of a token that the present weights sampled is exactly 1; see
  docs/rollouts.md. In-process engine only, and slower."""
  attention: str = placement(
    "auto", one_of("auto", "xla", "triton", "mosaic", "tpu")
  )
  """`xla`, `triton` (NVIDIA), `mosaic` (Hopper), `tpu` or `auto`, the best that
  can run."""
  kv_dtype: str = learning("auto", one_of("auto", "float8"))
  """Dtype of the KV cache of the in-process engine: `auto`, that of
  `compute_dtype` (on a CPU, float32), or `float8` (e4m3) with a scale for each
  token and kv head, which takes half of the memory; see docs/rollouts.md."""
  free_kv_while_training: bool = placement(True)
  """Whether the KV cache is freed before each training and allocated again for
  the next rollout, if the in-process engine shares devices with training and
  they take turns (`pipeline.async_level` 0)."""

  @property
  def has_servers(self) -> bool:
    """Whether servers over HTTP sample."""
    return self.kind != "jax"


@dataclasses.dataclass(frozen=True)
class ServersConfig:
  """SGLang or vLLM servers that sample, if `engine.kind` names them."""

  urls: tuple[str, ...] = placement(("http://127.0.0.1:30000",))
  """Addresses of the servers; a question stays with one of them while it is up.
  """
  gateway: str = placement("")
  """Address of an smg gateway, started with --enable-rl, that lists the servers
  instead of `urls`. Servers may join and leave during a run. SGLang only."""
  router: str = placement("")
  """Address of a router that gets the turns and chooses a server for each; "":
  turns go straight to the servers. Weights and health requests always do.
  SGLang only."""
  deadline: float = placement(600.0, POSITIVE)
  """Seconds of one turn."""
  retries: int = placement(3, at_least(0))
  """Retries of a request after a broken connection, within seconds."""
  wait: float = placement(300.0, at_least(0))
  """Seconds that turns wait for a server to return when all are down, for
  example during a restart."""
  weights: str = placement("")
  """Folder in RAM through which the servers get the current weights; "": one
  under /dev/shm."""
  deltas: bool = placement(False)
  """Whether only changed weights are written to `weights`, a folder of this run
  that all hosts can read; launch/serve_sglang.sh patches their copies with them
  (DELTAS). SGLang only."""
  colocated: bool = placement(False)
  """Whether the servers are on the trainer's own GPUs, started with
  --enable-memory-saver (SGLang) or --enable-sleep-mode (vLLM). They
  release their memory before each training and get it back with the next turn;
  needs `pipeline.async_level` 0."""
  api_key_variable: str = placement("")
  """Environment variable with the servers' key; "": no key."""


@dataclasses.dataclass(frozen=True)
class AgentsConfig:
  """Programs that play the episodes of a training; see docs/agents.md."""

  program: str = learning("")
  """The program: a command, an address that begins with http, or a function of
  yours (`file.py:NAME`); "": the project plays the episodes itself."""
  tool: str = learning("search")
  """Name of the program's tool whose calls are charged as searches."""
  states_budget: bool = learning(True)
  """Whether the policy reads its budget in a system message."""
  turns: int = learning(64, at_least(1))
  """Limit on the turns of an episode; one that asks for more is dropped."""
  segments: int = learning(4, at_least(1))
  """Limit on the contexts of an episode: a program that rewrites its
  conversation begins another one. An episode with more is dropped."""
  deadline: float = placement(600.0, POSITIVE)
  """Seconds in which a program has to play an episode."""
  host: str = placement("127.0.0.1")
  """Address that the endpoint of the programs listens at."""
  port: int = placement(0, at_least(0))
  """Its port; 0: any free one."""
  address: str = placement("")
  """Address by which programs of other machines reach the endpoint, such as
  `http://trainer:8000`; "": that of `host` and its port."""


@dataclasses.dataclass(frozen=True)
class SearchConfig:
  """How the searches of many episodes reach the retriever."""

  cache: int = placement(65536, at_least(0))
  """Answers in the LRU cache, whose key is (query, k, corpus); 0 is off."""
  batch: int = placement(512, at_least(1))
  """Limit on the queries of one call."""
  concurrency: int = placement(4, at_least(1))
  """Limit on concurrent calls."""
  passage_characters: int = learning(65536, at_least(1))
  """Limit on a passage, title and text together; the rest is cut off and
  counted."""
  answer_characters: int = learning(262144, at_least(1))
  """The same limit on all passages of an answer together."""
  tools: tuple[str, ...] = placement(())
  """Your own retrievers for tools of the environment, each as
  `TOOL=path/to/file.py:NAME`; see `retrieval.kind`."""


@dataclasses.dataclass(frozen=True)
class TextModelConfig:
  """The language model that `retrieval.simulated` or `refined` asks."""

  name: str = learning("")
  """Name of the model, if it is at an address."""
  key_variable: str = placement("")
  """Environment variable with the key of that address; "": no key."""
  concurrency: int = placement(64, at_least(1))
  """Limit on concurrent calls to that address."""
  temperature: float = learning(0.8, at_least(0))
  """Sampling temperature at that address; the policy's own engine samples as
  `sampling` says."""
  top_p: float = learning(1.0, TOP_P)
  """Probability mass that is sampled from at that address."""
  repetition_penalty: float = learning(1.0, POSITIVE)
  """Divides the logits of tokens that occurred; 1 is off. Of the policy, only
  servers apply it."""
  max_tokens: int = learning(600, at_least(1))
  """Limit on the tokens of a reply."""
  deadline: float = placement(60.0, POSITIVE)
  """Seconds of one call; `episode.search_deadline` limits the whole search."""


@dataclasses.dataclass(frozen=True)
class PagesConfig:
  """Pages of the web: of search results, and of the tool `fetch`."""

  first: int = learning(0, at_least(0))
  """Number of results of a web search that show their page instead of the
  snippet."""
  words: int = learning(500, at_least(1))
  """The most words of such a page."""
  opened_words: int = learning(2000, at_least(1))
  """The most words of a page that `fetch` opens."""
  deadline: float = placement(15.0, POSITIVE)
  """Seconds for a page; of a search, for all of its pages."""
  largest: int = placement(2_000_000, at_least(1024))
  """Bytes of a page that are read."""
  agent: str = placement("anysearch_jax")
  """The User-Agent, by which robots.txt addresses the fetcher."""
  allow_private: tuple[str, ...] = placement(())
  """Networks that pages may be fetched from although they are not public, such
  as `10.0.0.0/8`."""


@dataclasses.dataclass(frozen=True)
class McpConfig:
  """A search tool of a Model Context Protocol server, for kind `mcp`."""

  command: tuple[str, ...] = placement(())
  """Program and arguments of a server that is started and talked to over its
  input and output; empty: the server is at `retrieval.url`."""
  variables: tuple[str, ...] = placement(())
  """Environment variables that the command gets besides PATH and HOME."""
  tool: str = placement("")
  """Name of the tool; "": the only one, or `search`."""
  query: str = placement("query")
  """Name of its argument for the query."""
  k: str = placement("")
  """Name of its argument for the number of results; "": none is sent."""
  arguments: str = placement("")
  """Further arguments of every call, as a JSON object; "": none."""
  fields: tuple[str, ...] = placement(())
  """Where the results are in the tool's output, if they are not the only list
  of its output schema, and the names of a result's parts, if they are not `id`,
  `title`, `text` and `score`: such as `results=data.hits` and `text=snippet`.
  Without these and without such a list, each text of the output is a result."""
  deadline: float = placement(30.0, POSITIVE)
  """Seconds of a call, with its retries."""


@dataclasses.dataclass(frozen=True)
class RetrievalConfig:
  """The retriever that answers the searches."""

  kind: str = placement("lexical")
  """`lexical`, BM25 over the passages that the questions come with; `index`, a
  folder of `anysearch build_index`; `http`, a server of Search-R1's protocol;
  `web`, a search engine; `milvus`, a collection of that command; `mcp`, a tool
  of a Model Context Protocol server; otherwise `module:NAME` or
  `path/to/file.py:NAME`, a function of yours that is given the configuration
  and returns a retriever."""
  index: str = placement("")
  """Folder of the index."""
  encoder: str = placement("")
  """Folder of the index's encoder, if it has moved, or address of its server;
  folder of the encoder of a collection."""
  url: str = placement("")
  """Address of the server, also of SearXNG."""
  web: str = placement("")
  """`serper`, `serpapi`, `brave`, `tavily` or `searxng`."""
  milvus: str = placement("")
  """Address of a Milvus server, or a file of Milvus Lite."""
  collection: str = placement("")
  """Name of the collection; "": `passages`."""
  ranking: str = placement("")
  """`bm25`, `dense` or `hybrid`, of Milvus or an index of kind hybrid; "": by
  words of Milvus, `hybrid` of such an index."""
  filter: str = placement("")
  """Which passages Milvus may find, as JSON: for each field a
  value or a list of them, such as `{"source": ["wiki", "news"]}`; "": all."""
  price: float = placement(0.0, at_least(0))
  """US dollars per search on the web, or call of an MCP tool."""
  concurrency: int = placement(0, at_least(0))
  """Limit on the calls to a service at a time; 0: 16 of the kinds `web` and
  `mcp`, 4 batches of `http`."""
  rate: float = placement(0.0, at_least(0))
  """Limit on the requests to a service in a second; 0: none."""
  wait: float = placement(600.0, POSITIVE)
  """Seconds that a search may wait for its turn at a service: for
  `concurrency`, for `rate`, or because the service says so (429)."""
  key_variable: str = placement("")
  """Environment variable with the token or key."""
  log: str = placement("")
  """File of recorded answers; "": off."""
  log_mode: str = placement("record", one_of("record", "replay", "strict"))
  """`record`, `replay` (asks the retriever only for what is missing) or
  `strict` (needs no retriever)."""
  simulated: str = learning("")
  """Language model that generates passages in training in place of the
  retriever (ZeroSearch). "": off; `world`: a script of the generated world;
  `policy`: the policy's own engine; anything else is the address of an OpenAI
  chat completions API (`http://host:8000/v1`)."""
  refined: str = learning("")
  """Language model that extracts what helps from the passages that were found
  (Search-o1), by the same names."""
  model: TextModelConfig = TextModelConfig()
  pages: PagesConfig = PagesConfig()
  mcp: McpConfig = McpConfig()
