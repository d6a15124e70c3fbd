"""The output: its journal, the folder it becomes, and what stands in it."""
