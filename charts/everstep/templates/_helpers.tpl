{{- define "everstep.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 50 | trimSuffix "-" -}}
{{- end -}}

{{- define "everstep.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- $name := include "everstep.name" . -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "everstep.serviceAccountName" -}}
{{- default (include "everstep.fullname" .) .Values.serviceAccount.name -}}
{{- end -}}

{{- define "everstep.image" -}}
{{- if .Values.image.digest -}}
{{- printf "%s@%s" .Values.image.repository .Values.image.digest -}}
{{- else -}}
{{- printf "%s:%s" .Values.image.repository (default .Chart.AppVersion .Values.image.tag) -}}
{{- end -}}
{{- end -}}

{{- define "everstep.selectorLabels" -}}
app.kubernetes.io/name: {{ include "everstep.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: operator
{{- end -}}

{{- /* Not managed-by "everstep": that label is of the children of jobs, and network policies select by it. */ -}}
{{- define "everstep.labels" -}}
{{ include "everstep.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name (.Chart.Version | replace "+" "_") }}
{{- end -}}

{{- /* Several releases (one per namespace) share a cluster: cluster-scoped names carry the release's namespace. */ -}}
{{- define "everstep.clusterName" -}}
{{- printf "%s-%s" (include "everstep.fullname" .) .Release.Namespace | trunc 63 | trimSuffix "-" -}}
{{- end -}}
