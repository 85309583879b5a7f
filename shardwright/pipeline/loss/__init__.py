"""The loss of microbatches that is the loss of the batch: what heads and criteria do is followed operator by
operator, then weighed.
"""
