"""The wrappers that boosting returns."""
