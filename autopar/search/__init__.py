"""The search: the fastest plan that fits in memory, with a proof.

options     inputs, limits and pins                 space       what is legal
enumerate   best-first over configurations          bounds      what can be skipped unsolved
stages      cuts and recomputation of one           columns, knapsack, partition: its parts
placements  ops of a block on the tp axis           recipes, infeasible: what to compare with
"""
