"""Triton kernels. Nothing imports them but where they are used, on CUDA: Triton takes long to import, and is not there
on every machine. TRITON_INTERPRET=1 runs them on a CPU, slowly, which is how they are tested.
"""
