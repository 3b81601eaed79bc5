"""AnySearch in JAX: one search policy for any budget.

Table of contents (arrows go down only):

* `types`, `config`: the values that everything else passes around.
* `protocol`, `prompts`, `scoring`: text in, values out.
* `rewards`, `curriculum`, `objective`: arrays in, arrays out.
* `weights`, `tensor_files`: the parameter table; safetensors in and out by it.
* `policy`: the Flax decoder and its Hugging Face folders.
* `rollout`: the episode, the driver, the in-process engine.
* `training`: batching, the train step, the loop, the warm start.
* `evaluation`: metrics with intervals, the report.
* `export`: a run's policy as a Hugging Face folder.
* `data`: questions and the generated knowledge world.
"""

__version__ = "0.1.0"
