"""The operations of generation, each in two forms.

plain.py        PyTorch, for any device
gpu.py          Triton, for CUDA devices: the same names, signatures and results
choice.py       which of both a device uses
one_row.py      product of one row and a weight matrix (used by gpu.py)
few_rows.py     product of 2 to 64 rows and a weight matrix
pointwise.py    norms, soft-caps and gates between products
slot_states.py  copies of states between slots and a batch
sampling.py     scores to tokens; its plain form is in ../sampler.py
overlap.py      lets a launch start before the previous one has ended
"""

MAX_ROWS = 64  # the most that the products for few rows take: see `few_rows.py`
