"""Scripts and configurations of other frameworks, run and read as they are."""
