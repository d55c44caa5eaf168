"""The agent of one node: obeys the newest leader, supervises the node's processes, and ends with the pod.

Here belongs what every pod of a job runs, the leader's too. What is decided for the whole job is in leader/.
"""
