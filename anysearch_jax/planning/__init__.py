"""Plans ahead of time what a configuration needs on hardware that is not here.

* `targets`: hardware by name, with compile-only devices.
* `program`: a jitted function with abstract arguments; `programs`: those of a
  configuration.
* `episodes`: what is assumed about the episodes of a run.
* `compilation`: compiles a program for a target; reads the compiler's report.
* `flops`: counts the matrix products of a jaxpr, with loops multiplied out.
* `collectives`: counts bytes between devices in compiled text; `hlo` parses it.
* `memory`: bytes on a device by kind, of a program and of the others beside it.
* `roofline`: predicts seconds, under stated assumptions.
* `whole_step`: predicts a step with its sampling.
* `plan`: the resulting values, with a verdict.
* `planner`: makes plans; `search`: compiles candidates; `advice`: suggests
  changes that would fit.
* `rendering`: formats a plan as text, Markdown and JSON.
"""
