"""A real Kubernetes cluster of several nodes on one machine.

Everything that starts, breaks and removes that cluster belongs here. Nothing here may know what everstep is:
the operator, its CRDs and its jobs are put onto the cluster by others.
"""
