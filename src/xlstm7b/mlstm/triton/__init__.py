"""The cell's Triton kernels: the chunkwise form with its backward pass, and the fused step."""
