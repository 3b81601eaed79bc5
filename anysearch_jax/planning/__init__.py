"""Plans ahead of time what a configuration needs on hardware that is not here.

* `targets`: hardware by name, with compile-only devices; predicts seconds.
* `programs`: the jitted functions of a configuration with abstract arguments.
* `compilation`: compiles a program for a target and measures it: the compiler's
  report, and bytes on a device by kind.
* `flops`: counts the matrix products of a jaxpr, with loops multiplied out.
* `collectives`: counts bytes between devices in compiled text.
* `whole_step`: predicts a step with its sampling, for assumed episodes.
* `plan`: the resulting values with a verdict, as text, Markdown and JSON.
* `planner`: makes plans, suggests changes that would fit, compiles candidates.
"""
