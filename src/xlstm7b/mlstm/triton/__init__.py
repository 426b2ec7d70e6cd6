"""The cell's Triton kernels: the chunkwise form, forward and backward, and the fused step."""
