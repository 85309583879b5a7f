"""What is known about any transformers model without reading its code: how it is called, and how it runs without
data.
"""
