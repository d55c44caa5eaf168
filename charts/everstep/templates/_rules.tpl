{{- /*
What the operator may do where jobs are. Every verb is one it uses: the table is everstep_operator/cluster/rbac.py,
and a test compares the two in both directions. No get, list or watch of Secrets anywhere: it makes a job's token
and never reads one.
*/ -}}
{{- define "everstep.jobRules" -}}
- apiGroups: [everstep.dev]
  resources: [trainingjobs]
  verbs: [get, list, watch, delete]
- apiGroups: [everstep.dev]
  resources: [trainingjobs/status]
  verbs: [patch]
# Pods block their job's foreground deletion. Where OwnerReferencesPermissionEnforcement is on (OpenShift), that takes
# this right; nothing is ever written there.
- apiGroups: [everstep.dev]
  resources: [trainingjobs/finalizers]
  verbs: [update]
- apiGroups: [""]
  resources: [pods]
  verbs: [create, get, list, watch, delete]
- apiGroups: [""]
  resources: [services]
  verbs: [create, get, patch]
- apiGroups: [""]
  resources: [secrets]
  verbs: [create, delete]
- apiGroups: [""]
  resources: [configmaps]
  verbs: [create, get, list, delete]
# Whether a claim that a job mounts can be mounted on several nodes.
- apiGroups: [""]
  resources: [persistentvolumeclaims]
  verbs: [get]
- apiGroups: [""]
  resources: [events]
  verbs: [create, list]
{{- end -}}

{{- /* There too, where jobs get PodDisruptionBudgets. */ -}}
{{- define "everstep.budgetRules" -}}
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [create, get, list, delete]
{{- end -}}

{{- /* What has no namespace. */ -}}
{{- define "everstep.clusterRules" -}}
- apiGroups: [everstep.dev]
  resources: [trainingpools]
  verbs: [list, watch]
- apiGroups: [""]
  resources: [nodes]
  verbs: [get, list, watch]
{{- end -}}

{{- /* Likewise, where dead nodes may be marked out of service. */ -}}
{{- define "everstep.taintRules" -}}
- apiGroups: [""]
  resources: [nodes]
  verbs: [patch]
{{- end -}}

{{- /* In kube-node-lease: whether the kubelet of a silent agent's node is silent too. */ -}}
{{- define "everstep.nodeLeaseRules" -}}
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  verbs: [get]
{{- end -}}

{{- /* In the operator's own namespace: its leader election, the key from which job tokens are derived, and a record. */ -}}
{{- define "everstep.ownRules" -}}
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  verbs: [create, get, update]
- apiGroups: [""]
  resources: [secrets]
  verbs: [create]
# The record of nodes on which jobs have failed.
- apiGroups: [""]
  resources: [configmaps]
  verbs: [create, get, update]
{{- end -}}
