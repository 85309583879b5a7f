"""What users need to test their own policies: rank processes, comparison, tiny models."""
