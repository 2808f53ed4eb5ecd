"""Triton kernels for the decode path, each beside its plain-torch reference: trunk, experts, router, n-gram table.

Why here: a kernel is one way to run what lab.ops defines; the codecs' canonical bytes stay the truth, and every kernel is compared with their decode.
Importing a module of this package needs `triton`; this file does not. What it does not prove: speed, which is measured by experiments/kernel_bench.py
on the machine at hand.
"""
