"""Jobs:

their specification, the loop that runs them, the cluster below, the command line above. Wires all other packages.
"""
