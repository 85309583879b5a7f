"""What is known of a step before it runs: actions, where they run, their order, its simulated time and memory, the
search over them.
"""
