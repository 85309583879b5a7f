"""Operators that do in one what torch does in several: less memory read, written or kept.

linear_cross_entropy   a head over the vocabulary and its loss, without the logits
cross_entropy_rows     the losses of rows of logits, and their gradients
logit_steps            what models do to logits before the loss: scales, soft caps
lazy_logits            what a head returns while nobody has read its logits
norms                  RMS norm and layer norm
adam                   a step of Adam that writes the weights of the model as well
gated                  act(gate) * up, as MLPs with a gate have it
rotary                 rotary positions, in the forms that families write them in
backends               whose kernels there are: liger-kernel's, Triton's, or torch's operators

Each has a form in torch's own operators, which runs everywhere.
"""
