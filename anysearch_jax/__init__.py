"""AnySearch in JAX: one search policy for any budget.

Table of contents; a room imports only rooms above it:

* `types`: the values that cross rooms. `config`: the configuration.
* `host`: processes, locks, disks, HTTP calls.
* `environment`: tags, prompts, scoring, records: text in, values out.
* `algorithms`: rewards, curriculum, GRPO, PPO: arrays in, arrays out.
* `policy`: the decoder and its Hugging Face folders.
* `data`: other people's questions.
* `methods`: the compared systems.
* `rollout`: the episode, the driver, the in-process engine, SGLang.
* `generative_retrieval`: retrievers that ask a language model.
* `training`: batching, the train step, the loop, checkpoints.
* `evaluation`, `report`: measuring a policy and showing it.
* `export`: a checkpoint as a Hugging Face folder.
* `world`: the generated knowledge world and the warm start.
* `planning`: what a configuration needs on hardware that is not here.
"""

__version__ = "0.1.0"
