"""Files as they lie on a disk: safetensors, boxes of tensors, names inside a directory, HuggingFace layouts; read
and written by slices.
"""
