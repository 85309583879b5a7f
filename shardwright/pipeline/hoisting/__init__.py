"""What comes before the layers, once per step instead of once per microbatch and stage, and without waiting for the
device.
"""
