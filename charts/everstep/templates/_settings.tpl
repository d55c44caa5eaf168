{{- /* Environment of the operator; the names are those of everstep_operator/settings.py. */ -}}
{{- define "everstep.settings" -}}
{{- if and .Values.outOfServiceTaint (not .Values.nodeSilenceSeconds) -}}
{{- fail "outOfServiceTaint is true and nodeSilenceSeconds is 0: only nodes that are found dead by their silence are tainted. Set nodeSilenceSeconds to 15 or more, or outOfServiceTaint to false" -}}
{{- end -}}
{{- /* An empty variable is an absent one, which means the default. A comma is a list of none. */ -}}
EVERSTEP_WATCH_NAMESPACES: {{ join "," .Values.watchNamespaces | quote }}
EVERSTEP_CLUSTER_DOMAIN: {{ .Values.clusterDomain | quote }}
EVERSTEP_ALLOWED_SERVICE_ACCOUNTS: {{ join "," .Values.jobPods.allowedServiceAccounts | quote }}
EVERSTEP_ALLOWED_HOST_FIELDS: {{ join "," .Values.jobPods.allowedHostFields | quote }}
EVERSTEP_ALLOWED_PRIORITY_CLASSES: {{ join "," .Values.jobPods.allowedPriorityClasses | quote }}
EVERSTEP_COPIED_LABELS: {{ join "," .Values.jobPods.copiedLabels | default "," | quote }}
EVERSTEP_JOB_POD_ANNOTATIONS: {{ .Values.jobPods.annotations | default dict | toJson | quote }}
EVERSTEP_DISRUPTION_BUDGET: {{ .Values.jobPods.disruptionBudget | quote }}
EVERSTEP_FENCE_TIMEOUT: {{ .Values.fenceTimeoutSeconds | quote }}
EVERSTEP_NODE_SILENCE: {{ .Values.nodeSilenceSeconds | quote }}
EVERSTEP_OUT_OF_SERVICE_TAINT: {{ .Values.outOfServiceTaint | quote }}
EVERSTEP_NODE_FAILURE_WINDOW: {{ .Values.nodeFailureWindowSeconds | quote }}
EVERSTEP_NODE_SIGNALS: {{ .Values.nodeSignals | default list | toJson | quote }}
EVERSTEP_KEY_SECRET: {{ .Values.operatorKey.secretName | quote }}
EVERSTEP_LOG_LEVEL: {{ .Values.logging.level | quote }}
EVERSTEP_LOG_FORMAT: {{ .Values.logging.format | quote }}
{{- end -}}
