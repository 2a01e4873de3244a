"""Measures the Triton kernels on a CUDA device beside what others offer for the same work."""
