"""Raw communication: no autograd, no modules."""
