"""everstep beside its peers on one cluster, in one run: Indexed Jobs, JobSet, Kubeflow Trainer and mpi-operator.

Here belongs what installs the peers as their own modules ship them, runs the same worker under each, and shows the
result, whoever is faster. Floors that are no product, and targets, belong into the other benchmarks.
"""
