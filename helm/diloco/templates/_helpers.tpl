{{- define "diloco.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name -}}
{{- printf "%s-operator" (.Release.Name | trunc 41 | trimSuffix "-") -}}
{{- else -}}
{{- printf "%s-%s-operator" (.Release.Name | trunc 20 | trimSuffix "-") ($name | trunc 20 | trimSuffix "-") -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "diloco.selector" -}}
app.kubernetes.io/name: {{ default .Chart.Name .Values.nameOverride }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: operator
{{- end -}}

{{- define "diloco.labels" -}}
{{ include "diloco.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/part-of: diloco
{{- if not .Values.plainManifests }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}
{{- end -}}

{{- define "diloco.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "diloco.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{/* Name of an image: (dict "root" . "image" .Values.images.operator) */}}
{{- define "diloco.image" -}}
{{- $images := .root.Values.images -}}
{{- with $images.registry }}{{ . | trimSuffix "/" }}/{{ end -}}
{{- .image.repository -}}
{{- if .image.digest }}@{{ .image.digest }}{{ else }}:{{ default .root.Chart.AppVersion $images.tag }}{{ end -}}
{{- end -}}

{{/* What the operator may do with jobs and what it makes of them, in every namespace that it serves. Secrets are only ever
made, never read: a job's token is known to its own pods, and follows from the key beside the lease. */}}
{{- define "diloco.jobRules" -}}
- apiGroups: [diloco.dev]
  resources: [decoupleddilocojobs]
  verbs: [get, list, watch, patch, delete]
- apiGroups: [diloco.dev]
  resources: [decoupleddilocojobs/status]
  verbs: [patch]
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch, create, delete]
- apiGroups: [""]
  resources: [services, configmaps]
  verbs: [get, list, watch, create, patch]
- apiGroups: [""]
  resources: [persistentvolumeclaims]
  verbs: [get, create, patch]
- apiGroups: [""]
  resources: [secrets]
  verbs: [create]
- apiGroups: [apps]
  resources: [statefulsets]
  verbs: [get, list, watch, create, patch]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, create, patch]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, create, patch]
- apiGroups: [events.k8s.io]
  resources: [events]
  verbs: [create, patch]
{{- if eq .Values.operator.statusVia "proxy" }}
- apiGroups: [""]
  resources: [pods/proxy]
  verbs: [get, create]
{{- end }}
{{- end -}}
