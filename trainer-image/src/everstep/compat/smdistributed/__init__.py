"""Names of the SageMaker model parallel library v1, from its public documentation alone."""
