"""Ahead of time: what a configuration needs on hardware that is not here.

targets      hardware by name; compile-only devices
program      a jitted program with abstract arguments
compilation  a program compiled for a target, and what the compiler says of it
flops        matrix-product FLOPs of a jaxpr, loops multiplied out
collectives  bytes between devices, from compiled HLO
memory       bytes a device by kind, against its capacity
roofline     predicted seconds, with the assumptions behind them
plan         all of it for a configuration, with a verdict
advice       what would make it fit
rendering    a plan as text, Markdown and JSON
search       micro-batches, recomputation and meshes, tried one after another
"""
