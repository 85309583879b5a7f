"""Number formats: policies, the loss scaler and the gradient norm."""
