"""The agent's processes, with real ones: each test runs a supervisor in a process of its own (it reaps every child)."""
