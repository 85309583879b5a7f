"""Autograd functions on local tensors.

collective     copy, reduce, gather, split, reduce_scatter, all_to_all over a group, each with the backward that its use
               needs
linear         column, row and plain linears; one all-reduce for inputs that several of them share
fp8            the three products of a linear in 8 bits, and their scales
postponed      products with parameters in the middle of a module's own forward, whose weight gradient can wait
weight_grad    `WeightGradStore`: weight gradients that wait for a schedule's W action
embedding      vocabulary-parallel lookup
cross_entropy  vocabulary-parallel loss, and vocab_mode, which brings it to heads that compute theirs inline
"""
