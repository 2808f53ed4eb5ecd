"""Experts that are not all on the device: what keeps them in host memory and brings them, or their results, to the GPU.

`tiers.Tiers` is made once per engine and asked layer by layer (`lab.engines.path_binder`). What each placement does is in its own module: `tiered` copies
missing experts into slots on the device, `cold` computes them on the CPU. `kinds` and `checks` need no torch: they judge before a cell runs and after it.
What it does not prove: that a placement is worth its bus traffic; the records show that.
"""
