"""Settings as models of pydantic: every field is a flag, a key of a file, and an argument."""
