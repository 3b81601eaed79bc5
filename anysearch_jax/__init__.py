"""AnySearch in JAX: one search policy for any budget.

Table of contents (arrows go down only):

* `types`, `config`: the values that everything else passes around.
* `protocol`, `prompts`, `scoring`: text in, values out.
* `rewards`, `curriculum`, `objective`: arrays in, arrays out.
* `policy`: the Flax decoder; `weights`: safetensors by a two-way name table.
* `rollout`: the episode, the driver, the in-process engine.
* `training`: batching, the train step, the loop, the warm start.
* `evaluation`: metrics with intervals, the report.
* `data`: questions and the generated knowledge world.
"""
