"""Ahead of time: what a configuration needs on hardware that is not here.

* `targets`: hardware by name, with compile-only devices.
* `program`: a jitted function with abstract arguments; `programs`: those of a
  configuration.
* `compilation`: a program compiled for a target, and what the compiler says.
* `flops`: matrix products of a jaxpr, loops multiplied out.
* `collectives`: bytes between devices, from compiled text that `hlo` reads.
* `memory`: bytes a device by kind, and what stays there for other programs.
* `roofline`: predicted seconds, with the assumptions behind them.
* `plan`: what is known of a configuration on a target, with a verdict.
* `planner`: makes plans; `search`: tries candidates; `advice`: what would fit.
* `rendering`: a plan as text, Markdown and JSON.
"""
