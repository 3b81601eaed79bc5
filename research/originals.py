"""Where the compared systems' repositories keep the texts of their authors.

Only places and hashes; `research.import_prompts` reads the texts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class Place:
  """A text in a Python file.

  Attributes:
    file: path in the repository.
    function: name of the function that holds the text; "": none does.
    variable: name that the text is assigned to, alone or as the content of a
      chat's messages; "" for a text that is returned or appended to a list.
    index: which of the function's texts with that variable, in source order.
    sha256: hash of the text, with its placeholders renamed by `names`.
    names: placeholders by the variables that the text interpolates.
    inner: whether only the lines between the first and the last are the text.
  """

  file: str
  function: str
  variable: str
  index: int
  sha256: str
  names: Mapping[str, str]
  inner: bool = False

  @property
  def symbol(self) -> str:
    """The function or the variable, for messages."""
    return f"{self.function}()" if self.function else self.variable


@dataclasses.dataclass(frozen=True)
class Original:
  """The texts of a system's authors.

  Attributes:
    repository: on GitHub.
    commit: the one that the hashes are of.
    texts: places whose texts are joined, by the name of the text in the prompt
      file; a string among them joins as it is. Names that are missing keep the
      shipped texts.
  """

  repository: str
  commit: str
  texts: Mapping[str, tuple[Place | str, ...]]


_GENERATION = "search_r1/llm_agent/generation.py"
_QUESTION = {"question": "Question"}
# Of prompts that are a system's message: the question is the user's.
_ASKED = "\n\n{Question}"
_MARKS = {"BEGIN_SEARCH_RESULT": "", "END_SEARCH_RESULT": ""}
_SIMULATED = {"problem": "question", "ground_truth": "answer", "query": "query"}

# BATS and OTC-PO have no public code. MT-GRPO's prompt describes a tool that is
# called in JSON, which the environment that it is played in does not have.
ORIGINALS = {
  "search_r1": Original(
    "PeterGriffinJin/Search-R1",
    "a14dc3a4ffc6fe88c1e95038d9738e21ba3f7a06",
    {
      "prompt": (
        Place(
          "scripts/data_process/qa_search_train_merge.py",
          "make_prefix",
          "prefix",
          0,
          "11af1f74e04653561a9747bd2191264f01bd3c4c4f4c1c06911890e9a7ffb0a5",
          _QUESTION,
        ),
      ),
      "no_action": (
        Place(
          _GENERATION,
          "execute_predictions",
          "",
          -1,
          "2b4e05101bcbf539265251f74e7730289cf105d94dff9a05193061e9b0f050ba",
          {},
        ),
      ),
    },
  ),
  "ikea": Original(
    "hzy312/knowledge-r1",
    "79c38e8d4b1df0304fe1765e31fc7f4230637b74",
    {
      "prompt": (
        Place(
          "scripts/data_process/nq_hotpotqa_knowledge_boundary.py",
          "make_prefix",
          "prefix",
          0,
          "451048dbc355f8966c524f687bd2bdfa13a03ee1037622a2bd501fc2132e5b2e",
          _QUESTION,
        ),
      ),
      "no_action": (
        Place(
          _GENERATION,
          "execute_predictions",
          "",
          -1,
          "2b4e05101bcbf539265251f74e7730289cf105d94dff9a05193061e9b0f050ba",
          {},
        ),
      ),
    },
  ),
  "stepsearch": Original(
    "Zillwang/StepSearch",
    "43215bab9118a4c8e01b15082f74b2aea30c1fc8",
    {
      "prompt": (
        Place(
          "scripts/data_process/musi_search.py",
          "make_prefix",
          "prefix",
          -1,
          "5e803bbc3fd633c765007af01ffd1426eaeeddff3a7853b824ea2b8e6fc5c2fa",
          _QUESTION,
        ),
      ),
      "warning": (
        Place(
          _GENERATION,
          "execute_predictions",
          "final_warning",
          0,
          "cb1325aec420e1ebb6c4d2cf913b12b82c49ad995a797737d216f42d3c470c82",
          {},
        ),
      ),
      "no_action": (
        Place(
          _GENERATION,
          "execute_predictions",
          "message",
          -1,
          "03e79be8f0fbf5c596a7df28d6325263c5f92a9c398e090e98d1fdeb31eff00a",
          {},
        ),
      ),
    },
  ),
  "zerosearch": Original(
    "Alibaba-NLP/ZeroSearch",
    "2d4cdca033ee2c11b1fcfc7fc448b902d7cf8bf5",
    {
      "prompt": (
        Place(
          "inference.py",
          "main",
          "prompt",
          0,
          "11af1f74e04653561a9747bd2191264f01bd3c4c4f4c1c06911890e9a7ffb0a5",
          _QUESTION,
        ),
      ),
      "no_action": (
        Place(
          "llm_agent/generation.py",
          "execute_predictions",
          "",
          -1,
          "2b4e05101bcbf539265251f74e7730289cf105d94dff9a05193061e9b0f050ba",
          {},
        ),
      ),
      "simulator_useful": (
        Place(
          "llm_agent/generation.py",
          "search_simulate_prompt",
          "prompt",
          0,
          "7a4846d5700dd4ba9f286dc8a20a78400b174780dfe1c5c81a642e5ddb13240b",
          _SIMULATED,
        ),
      ),
      "simulator_noisy": (
        Place(
          "llm_agent/generation.py",
          "search_simulate_prompt",
          "prompt",
          1,
          "0fe0d8e1bf44444812cd95dcddf257f4d9fb7ff77763e201e424501d68e39246",
          _SIMULATED,
        ),
      ),
    },
  ),
  "search_o1": Original(
    "sunnynexus/Search-o1",
    "6ced48f5d97ca277a5689f5c135926a39ff903eb",
    {
      "prompt": (
        Place(
          "scripts/prompts.py",
          "get_multiqa_search_o1_instruction",
          "",
          0,
          "3f6f0a4152d41d3d6d8e5d46476d07073c2338bc0dc41fd02b70ae98bd46ad5f",
          {"MAX_SEARCH_LIMIT": "B"},
        ),
        Place(
          "scripts/prompts.py",
          "get_task_instruction_openqa",
          "user_prompt",
          -1,
          "665e96b5c1178f419c467fe0e1ffffbbccd69f21ddbdaa5b6e1f4313486f373c",
          _QUESTION,
        ),
      ),
      "over_budget": (
        Place(
          "scripts/run_search_o1.py",
          "main",
          "limit_message",
          0,
          "05a6291239b950093cf230253ae9ef200f8803b6d14a0fcb1ede4b9ba17efa3a",
          _MARKS,
          inner=True,
        ),
      ),
      "repeated": (
        Place(
          "scripts/run_search_o1.py",
          "main",
          "limit_message",
          1,
          "1805434deacfa8b207947c5e79ba2f6ae904e21202d3c9e3a845350752af4ad4",
          _MARKS,
          inner=True,
        ),
      ),
      "nothing_found": (
        Place(
          "scripts/evaluate.py",
          "extract_answer",
          "extracted_text",
          -1,
          "73185734be9804a42589223f3ed16b257774cc33ed053419ccb1b22df58e5e46",
          {},
        ),
      ),
      "reader": (
        Place(
          "scripts/prompts.py",
          "get_webpage_to_reasonchain_instruction",
          "",
          0,
          "68247d38686f60355859f278305852930d765e1f2402c4454faa3c7e3377c225",
          {
            "prev_reasoning": "reasoning",
            "search_query": "query",
            "document": "documents",
          },
        ),
      ),
    },
  ),
  "research": Original(
    "Agent-RL/ReSearch",
    "c820a43d05b5e7fa409efb8ea76e295daa854717",
    {
      "prompt": (
        Place(
          "src/verl/utils/dataset/template.py",
          "",
          "re_search_template_sys",
          0,
          "c3fa47ad93ad8dfe7455e6e17b30c688003a09628e77d1990a67fe1e6247fc49",
          {},
        ),
        _ASKED,
      ),
    },
  ),
  "autorefine": Original(
    "syr-cn/AutoRefine",
    "83637883d98801dab1bd2dc36b9186a25efdaa98",
    {
      "prompt": (
        Place(
          "preprocess/data_process/utils.py",
          "make_prefix",
          "prefix",
          0,
          "59f7621fbde44118ce345a67d6ebc79c7eeeb0f153a16590c9e4b0f4c40c63ed",
          _QUESTION,
        ),
      ),
      "no_action": (
        Place(
          _GENERATION,
          "execute_predictions",
          "",
          -1,
          "2b4e05101bcbf539265251f74e7730289cf105d94dff9a05193061e9b0f050ba",
          {},
        ),
      ),
    },
  ),
  "r1_searcher": Original(
    "RUCAIBox/R1-Searcher",
    "631167cbb3c2464f805730e3e364a690f5b136d4",
    {
      "prompt": (
        Place(
          "OpenRLHF-RAG/openrlhf/datasets/prompts_dataset.py",
          "preprocess_data",
          "messages_chat",
          0,
          "f8bb774878bf9f99c3e505fe15379eeaf28578f02371967553e1262ac745e127",
          {},
        ),
        _ASKED,
      ),
    },
  ),
  "ssrl": Original(
    "TsinghuaC3I/SSRL",
    "3009f2163497ec3f14508bb5e0c60e82536c13f6",
    {
      "no_action": (
        Place(
          "llm_agent/generation.py",
          "execute_predictions",
          "",
          -1,
          "2b4e05101bcbf539265251f74e7730289cf105d94dff9a05193061e9b0f050ba",
          {},
        ),
      ),
    },
  ),
  "hiprag": Original(
    "qualidea1217/HiPRAG",
    "3e64036521a02128fc5eebda8c65fe1ea5326ef5",
    {
      "prompt": (
        Place(
          "prompt.py",
          "",
          "AGENT_PROMPT_V2_SHORT",
          0,
          "d3f051ce2c8535cbe9c3a96d6a13e7ccd69981f41453561d212204829a48974e",
          {},
        ),
        Place(
          "inference.py",
          "inference_hf_single",
          "input_text",
          0,
          "d7d3db7621257002d461ec4b7e9b24ad4276784a25c6454ecd6a9ab204c59881",
          {"prompt": "", "question": "Question"},
        ),
      ),
      "no_action": (
        Place(
          _GENERATION,
          "execute_predictions",
          "",
          -1,
          "6e046084200e1c7db9517c6625e3a36c0aeeaa6d6beae8dc40697359823981ed",
          {},
        ),
      ),
    },
  ),
}
